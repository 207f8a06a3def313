"""The load of experts as the engines reported it last, and questions for news. Uses no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.source_load import SourceLoad, merge_sources
from moestro.wire.messages import ExpertReport, ReadExperts, load_of

# A report costs an engine less than a millisecond, and a scrape shows the one that the scrape before it requested.
REFRESH_NS = 5_000_000_000
ANSWER_S = 2.0  # an engine in a long step answers after it; until then its last report counts


@dataclass(slots=True)
class EngineReport:
    """What is known of one engine.

    Attributes:
        load: Load of its last report; None while it has counted nothing. It outlives the engine's process.
        at_ns: Time of the report; None means that none came.
        error: Why the engine counts no longer; "" means that it does.
        earlier_steps: Steps of former processes since the windows were cleared.
    """

    load: SourceLoad | None = None
    at_ns: int | None = None
    error: str = ""
    earlier_steps: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the present process's window."""
        return 0 if self.load is None else self.load.num_steps

    @property
    def num_visits(self) -> int:
        """Visits of tokens to experts since the process started."""
        return 0 if self.load is None else int(self.load.counts.sum())


@dataclass(slots=True, eq=False)
class _Question:
    """A question's number, the engines that have not answered it, and the event that all have."""

    number: int
    waits_for: set[int]
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoad:
    """Load of the experts by the tokens of all engines.

    Attributes:
        load: The load; each engine is a source.
        layers: int64[layers], the network's layer of each of its layers.
    """

    load: ExpertLoad
    layers: NDArray[np.int64]

    @property
    def balance(self) -> NDArray[np.float64]:
        """float64[layers], mean load of the experts over the largest; 1 means even, and no load counts as even."""
        total = self.load.total
        largest = total.max(axis=1)
        balance: NDArray[np.float64] = np.divide(
            total.mean(axis=1), largest, out=np.ones(len(total)), where=largest > 0
        )
        return balance


class ExpertLoads:
    """Asks engines for the load of their experts, and combines their reports.

    Args:
        num_engines: Number of engines.
        ask: Callable that sends a question to an engine, and returns whether the engine can be reached.

    Attributes:
        engines: What is known of each engine.
    """

    def __init__(self, num_engines: int, ask: Callable[[int, ReadExperts], bool]) -> None:
        self._ask = ask
        self.engines = [EngineReport() for _ in range(num_engines)]
        self._questions: list[_Question] = []
        self._number = 0  # of the last question
        self._last_question_ns: int | None = None
        self._merged: GroupLoad | None = None
        self._is_merged = False

    # --- questions --------------------------------------------------------------------------------------------------

    async def read(self, *, with_pairs: bool = False, clear: bool = False) -> None:
        """Ask all engines, and wait until they have answered, for at most `ANSWER_S`.

        Args:
            with_pairs: Whether to ask for pairs of experts.
            clear: Whether the engines empty their windows first.
        """
        number, waits_for = self._ask_all(with_pairs=with_pairs, clear=clear)
        if clear:
            for report in self.engines:
                report.earlier_steps = 0
        if not waits_for:
            return
        question = _Question(number, waits_for)
        self._questions.append(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                await question.answered.wait()
        except TimeoutError:
            pass  # The reports say how old they are.
        finally:
            self._questions.remove(question)

    def refresh(self, now_ns: int) -> None:
        """Ask all engines without waiting, unless that was done a moment ago."""
        if self._last_question_ns is None or now_ns - self._last_question_ns >= REFRESH_NS:
            self._last_question_ns = now_ns
            self._ask_all()

    def _ask_all(self, *, with_pairs: bool = False, clear: bool = False) -> tuple[int, set[int]]:
        """Send a question. Returns its number, and the engines that will answer it."""
        self._number += 1
        question = ReadExperts(self._number, with_pairs=with_pairs, clear=clear)
        return self._number, {engine for engine in range(len(self.engines)) if self._ask(engine, question)}

    # --- from the engines -------------------------------------------------------------------------------------------

    def on_message(self, engine: int, message: ExpertReport, now_ns: int) -> None:
        """Take in a report.

        Raises:
            ValueError: Its arrays do not fit each other; the last report stays.
        """
        report = self.engines[engine]
        load = load_of(message)
        if load is not None and load.pairs is None and report.load is not None and load.num_steps:
            load = replace(load, pairs=report.load.pairs)  # The last ones, because not every question requests them.
        if load is not None or message.error:
            report.load = load or report.load
        report.at_ns, report.error = now_ns, message.error
        self._is_merged = False
        self._answered(engine, message.number)

    def ended(self, engine: int) -> None:
        """Note that an engine's process has ended. Its last report stays, until the next process has counted steps."""
        report = self.engines[engine]
        if report.load is not None:
            report.earlier_steps += report.load.num_steps
            report.load = replace(report.load, num_steps=0)
        self._is_merged = False
        self._answered(engine, self._number)

    def _answered(self, engine: int, number: int) -> None:
        for question in self._questions:
            if question.number <= number:
                question.waits_for.discard(engine)
                if not question.waits_for:
                    question.answered.set()

    # --- for operators ----------------------------------------------------------------------------------------------

    def num_steps(self) -> list[int]:
        """Return the steps of each engine since its window was cleared, with those of its former processes."""
        return [report.num_steps + report.earlier_steps for report in self.engines]

    def load(self) -> ExpertLoad | None:
        """Return the load of all engines together; None means that nothing was counted."""
        merged = self.merged()
        return None if merged is None else merged.load

    def merged(self) -> GroupLoad | None:
        """Return the load of all engines together; None means that nothing was counted."""
        if not self._is_merged:
            found = merge_sources([_with_earlier(report) for report in self.engines])
            self._merged = None if found is None else GroupLoad(*found)
            self._is_merged = True
        return self._merged


def _with_earlier(report: EngineReport) -> SourceLoad | None:
    """Return the load with the steps of former processes, which tell how busy the engine is."""
    if report.load is None:
        return None
    return replace(report.load, num_steps=report.load.num_steps + report.earlier_steps)
