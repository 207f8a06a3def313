"""Collects a rank's expert load beside its steps. A failure ends the collection, never the rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from moestro.core.work import StepResult
from moestro.placement.load_window import LoadWindow
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.expert_reports import ExpertReport, ReadExperts, report_of

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")


def _harmless(
    method: Callable[Concatenate[ExpertCollection, _P], None],
) -> Callable[Concatenate[ExpertCollection, _P], None]:
    """Make a method do nothing after an error, which is logged once."""

    @wraps(method)
    def guarded(self: ExpertCollection, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.error:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self._window = None
            logger.exception("the load of experts is no longer counted; requests are served as before")

    return guarded


class ExpertCollection:
    """The window of one rank's expert load; implements `engine.rank.ExpertObserver`.

    Args:
        settings: Half-life of the window.

    Attributes:
        error: Why nothing is counted any more; "" means that everything is.
    """

    def __init__(self, settings: ExpertLoadSettings) -> None:
        self._half_life = settings.expert_load_half_life
        self._window: LoadWindow | None = None  # made when the first counts show its shape
        self._num_skipped = 0  # steps before it
        self.error = ""

    @_harmless
    def observe(self, result: StepResult) -> None:
        """Implement `ExpertObserver.observe`."""
        counts, choices = result.expert_counts, result.expert_choices
        assert counts is not None, "the rank passes on results with counts"
        if self._window is None:
            num_layers, num_experts = counts.shape
            self._window = LoadWindow(num_layers, num_experts, self._half_life)
            self._window.skip(self._num_skipped)
        self._window.observe(counts)
        if choices is not None:
            num_layers, _, num_chosen = choices.shape
            self._window.observe_choices(choices, int(counts.sum()) // (num_layers * num_chosen))

    @_harmless
    def skip(self, num_steps: int) -> None:
        """Implement `ExpertObserver.skip`."""
        if self._window is None:
            self._num_skipped += num_steps
        else:
            self._window.skip(num_steps)

    def report(self, question: ReadExperts) -> ExpertReport:
        """Answer the API server."""
        if question.clear:
            self._clear()
        window = self._window
        if window is not None:
            try:
                return report_of(question.number, window.load(with_pairs=question.with_pairs))
            except Exception:  # for instance a lack of memory for a moment
                logger.exception("the load of experts could not be reported")
        return ExpertReport(question.number, error=self.error)

    @_harmless
    def _clear(self) -> None:
        self._num_skipped = 0
        if self._window is not None:
            self._window.clear()
