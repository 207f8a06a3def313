"""What was decided, and how it came out: the last stories in memory, and all of them to whoever writes them down."""

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
    """One decision; `names`: of all rows at that time, for the row of an engine that goes may become another's."""

    decision: RouteDecision
    because: str
    names: Sequence[str]


class _Entry:
    """A story as it is kept: nothing is spelt out before somebody reads it."""

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
    """Keeps the stories of requests that run and the last that are over, by id, and hands each of these to `write`.

    Args:
        remember: how many that are over are kept.
        names: of the fleet's rows.
        write: None: there is no file.
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
        """A request was given to an engine; `because`: it is not the first one that it was given to."""
        entry = self._running.get(request.request_id)
        if entry is None:
            entry = self._running[request.request_id] = _Entry(request.request_id, request.num_prompt_tokens)
        entry.attempts.append(_Attempt(decision, because, self._names()))

    def ended(self, request_id: str, status: int, usage: dict[bytes, int]) -> None:
        """It is over."""
        entry = self._running.pop(request_id, None)
        if entry is None:
            return
        entry.status, entry.usage, entry.ended_ns = status, usage, time.monotonic_ns()
        self._over[request_id] = entry
        self._over.move_to_end(request_id)  # an id that comes again
        while len(self._over) > self._remember:
            self._over.popitem(last=False)
        if self._write is not None:
            self._write(self._story(entry))

    def trace(self, request_id: str) -> RequestTrace | None:
        """What is known of a request; None: nothing, or no more, or nothing is remembered."""
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
