"""What was decided, and how it came out: the last stories in memory, and all of them to whoever writes them down."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from moestro.cluster.router import RouteDecision
from moestro.cluster.story import Attempt, Scored, Story
from moestro.core.request import Request

MAX_CANDIDATES = 32  # of one decision that are written down: the best, by their scores


class _Entry:
    """A story as it is kept: nothing is spelt out before somebody reads it."""

    __slots__ = ("attempts", "began_ns", "ended_ns", "num_prompt_tokens", "request_id", "status", "time_s", "usage")

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.time_s = time.time()
        self.began_ns = time.monotonic_ns()
        self.ended_ns = 0
        self.attempts: list[tuple[RouteDecision, str]] = []
        self.status: int | None = None
        self.usage: dict[bytes, int] = {}


class Journal:
    """Keeps the last stories by request id, and hands each that is over to `write`.

    Args:
        remember: how many are kept.
        name_of: the name of a row.
        write: None: there is no file.
    """

    def __init__(
        self, policy: str, remember: int, name_of: Callable[[int], str], write: Callable[[Story], None] | None
    ) -> None:
        self._policy = policy
        self._remember = remember
        self._name_of = name_of
        self._write = write
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def routed(self, request: Request, decision: RouteDecision, because: str) -> None:
        """A request was given to an engine; `because`: it is not the first one that it was given to."""
        entry = self._entries.get(request.request_id)
        if entry is None or not because:
            entry = self._entries[request.request_id] = _Entry(request.request_id, request.num_prompt_tokens)
            self._entries.move_to_end(request.request_id)  # an id that comes again
            while len(self._entries) > self._remember:
                self._entries.popitem(last=False)
        entry.attempts.append((decision, because))

    def ended(self, request_id: str, status: int, usage: dict[bytes, int]) -> None:
        """It is over."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.status, entry.usage, entry.ended_ns = status, usage, time.monotonic_ns()
        if self._write is not None:
            self._write(self._story(entry))

    def story(self, request_id: str) -> Story | None:
        """What is known of a request; None: nothing, or no more."""
        entry = self._entries.get(request_id)
        return None if entry is None else self._story(entry)

    def _story(self, entry: _Entry) -> Story:
        is_over = entry.status is not None
        return Story(
            request_id=entry.request_id,
            time=entry.time_s,
            policy=self._policy,
            prompt_tokens=entry.num_prompt_tokens,
            attempts=[self._attempt(decision, because) for decision, because in entry.attempts],
            status=entry.status,
            seconds=(entry.ended_ns - entry.began_ns) / 1e9 if is_over else None,
            usage={name.decode(): count for name, count in entry.usage.items()},
        )

    def _attempt(self, decision: RouteDecision, because: str) -> Attempt:
        rows, regret = np.flatnonzero(decision.routable), None
        if decision.scores is not None:
            scores = decision.scores[rows]
            rows = rows[np.argsort(scores, kind="stable")]
            others = decision.scores[rows[rows != decision.engine]]
            if len(others):
                regret = _finite(decision.score - float(others[0]))
        listed = list(rows[:MAX_CANDIDATES])
        if decision.engine not in listed:
            listed.append(decision.engine)
        return Attempt(
            engine=self._name_of(decision.engine),
            score=_finite(decision.score),
            reason=decision.reason,
            because=because,
            hit_tokens=decision.hit_tokens,
            candidates=[self._candidate(decision, int(row)) for row in listed],
            num_candidates=len(rows),
            regret=regret,
        )

    def _candidate(self, decision: RouteDecision, row: int) -> Scored:
        score = None if decision.scores is None else _finite(float(decision.scores[row]))
        return Scored(self._name_of(row), score, int(decision.all_hit_tokens[row]))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
