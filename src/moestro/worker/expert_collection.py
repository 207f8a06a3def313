"""Collects a rank's expert load beside its steps. A failure ends the collection, never the rank."""

from __future__ import annotations

import logging

from moestro.core.work import StepResult
from moestro.placement.load_window import LoadWindow
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.messages import ExpertReport, ReadExperts, report_of

logger = logging.getLogger(__name__)


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

    def observe(self, result: StepResult) -> None:
        """Implement `ExpertObserver.observe`."""
        window = self._window
        try:
            if window is not None and result.expert_choices is None:  # most steps
                window.observe(result.expert_counts)  # type: ignore[arg-type]
            elif not self.error:
                self._observe(result)
        except Exception as error:
            self._stop(error)

    def skip(self, num_steps: int) -> None:
        """Implement `ExpertObserver.skip`."""
        if self._window is None:
            self._num_skipped += num_steps
        else:
            self._window.skip(num_steps)

    def _observe(self, result: StepResult) -> None:
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

    def _stop(self, error: Exception) -> None:
        self.error, self._window = f"{type(error).__name__}: {error}", None
        logger.error("the load of experts is no longer counted; requests are served as before", exc_info=error)

    def report(self, question: ReadExperts) -> ExpertReport:
        """Answer the API server."""
        if question.clear:
            self._num_skipped = 0
        window = self._window
        if window is not None:
            try:
                if question.clear:
                    window.clear()
                return report_of(question.number, window.load(with_pairs=question.with_pairs))
            except Exception:  # for instance a lack of memory for a moment
                logger.exception("the load of experts could not be reported")
        return ExpertReport(question.number, error=self.error)
