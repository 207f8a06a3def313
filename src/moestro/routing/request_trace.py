"""Trace of one request through a router, readable for people: engine names, retries and outcome."""

from __future__ import annotations

import msgspec


class ScoredEngine(msgspec.Struct, frozen=True):
    """A candidate engine. A lower score is better; None means the policy computes no scores."""

    engine: str
    score: float | None
    hit_tokens: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One decision for a request. Further attempts follow when an engine fails before it responds.

    Attributes:
        engine: name of the chosen engine.
        because: reason for a further attempt; empty for the first.
        candidates: candidate engines, best first, including the chosen one.
        num_candidates: number of candidates, of which the list may contain only the best.
        regret: the value of `Candidates.regret`.
    """

    engine: str
    score: float | None
    reason: str
    because: str
    hit_tokens: int
    candidates: list[ScoredEngine]
    num_candidates: int
    regret: float | None


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True, tag="Story"):
    """Everything known about one request.

    Attributes:
        time: time of arrival, seconds since 1970.
        prompt_tokens: prompt length as counted by the router, exact or estimated from the text.
        status: status of the response. 499 means that the client disconnected; None means still running.
        seconds: time from arrival to the end, seconds; None means still running.
        usage: token counts reported by the response.
    """

    request_id: str
    time: float
    policy: str
    prompt_tokens: int
    attempts: list[Attempt]
    status: int | None
    seconds: float | None
    usage: dict[str, int]
