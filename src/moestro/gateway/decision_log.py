"""Decision log: keeps the traces of recent requests in memory, and passes finished ones to a writer."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moestro.core.request import Request
from moestro.routing.candidates import finite
from moestro.routing.request_trace import Attempt, RequestTrace, ScoredEngine
from moestro.routing.router import RouteDecision


class _Attempt(NamedTuple):
    """One decision, with the engine names of all rows at that time, because rows are reused."""

    decision: RouteDecision
    because: str
    names: Sequence[str]


class _Entry:
    """Compact form of a request's trace, expanded only for a reader."""

    __slots__ = ("attempts", "began_ns", "ended_ns", "num_prompt_tokens", "request_id", "status", "time_s", "usage")

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.time_s = time.time()
        self.began_ns = time.monotonic_ns()
        self.ended_ns = 0
        self.attempts: list[_Attempt] = []
        self.status: int | None = None
        self.usage: dict[bytes, int] = {}


class DecisionLog:
    """Keeps traces of running and recently ended requests by id, and passes those of ended requests to `write`.

    Args:
        policy: text form of the route policy.
        remember: limit of ended requests in memory.
        names: returns the names of the fleet's rows.
        write: receiver of the traces of ended requests; None means no record.
    """

    def __init__(
        self,
        policy: str,
        remember: int,
        names: Callable[[], Sequence[str]],
        write: Callable[[RequestTrace], None] | None,
    ) -> None:
        self._policy = policy
        self._remember = remember
        self._names = names
        self._write = write
        self._running: dict[str, _Entry] = {}
        self._over: OrderedDict[str, _Entry] = OrderedDict()

    def routed(self, request: Request, decision: RouteDecision, because: str) -> None:
        """Record that a request was sent to an engine. `because` is the reason for a retry; empty for the first."""
        entry = self._running.get(request.request_id)
        if entry is None:
            entry = self._running[request.request_id] = _Entry(request.request_id, request.num_prompt_tokens)
        entry.attempts.append(_Attempt(decision, because, self._names()))

    def ended(self, request_id: str, status: int, usage: dict[bytes, int]) -> None:
        """Record the end of a request."""
        entry = self._running.pop(request_id, None)
        if entry is None:
            return
        entry.status, entry.usage, entry.ended_ns = status, usage, time.monotonic_ns()
        self._over[request_id] = entry
        self._over.move_to_end(request_id)  # a reused id counts as the newest
        while len(self._over) > self._remember:
            self._over.popitem(last=False)
        if self._write is not None:
            self._write(self._story(entry))

    def trace(self, request_id: str) -> RequestTrace | None:
        """Return the trace of a request, or None if it is unknown, forgotten or kept without candidates."""
        entry = self._running.get(request_id) or self._over.get(request_id)
        if entry is None or any(attempt.decision.candidates is None for attempt in entry.attempts):
            return None
        return self._story(entry)

    def _story(self, entry: _Entry) -> RequestTrace:
        is_over = entry.status is not None
        return RequestTrace(
            request_id=entry.request_id,
            time=entry.time_s,
            policy=self._policy,
            prompt_tokens=entry.num_prompt_tokens,
            attempts=[_told(attempt) for attempt in entry.attempts],
            status=entry.status,
            seconds=(entry.ended_ns - entry.began_ns) / 1e9 if is_over else None,
            usage={name.decode(): count for name, count in entry.usage.items()},
        )


def _told(attempt: _Attempt) -> Attempt:
    decision, because, names = attempt
    candidates = decision.candidates
    assert candidates is not None, "the router keeps none"
    return Attempt(
        engine=names[decision.engine],
        score=finite(decision.score),
        reason=decision.reason,
        because=because,
        hit_tokens=decision.hit_tokens,
        candidates=[
            ScoredEngine(names[candidates.rows[at]], candidates.score(at), int(candidates.hit_tokens[at]))
            for at in candidates.ranked()
        ],
        num_candidates=candidates.num,
        regret=candidates.regret,
    )
