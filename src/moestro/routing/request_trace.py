"""One request's way through a router, for people: by the engines' names, with retries, and how it came out."""

from __future__ import annotations

import msgspec


class ScoredEngine(msgspec.Struct, frozen=True):
    """An engine that could have been chosen; `score`: lower is better, None where the policy gives none."""

    engine: str
    score: float | None
    hit_tokens: int


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of a request; there is another when an engine failed before it answered.

    Attributes:
        engine: the one chosen.
        because: why there was a decision at all, if it is not the first.
        candidates: those that could be chosen, the best first, the chosen one among them.
        num_candidates: how many there were; of very many not all are listed.
        regret: see `Candidates`.
    """

    engine: str
    score: float | None
    reason: str
    because: str
    hit_tokens: int
    candidates: list[ScoredEngine]
    num_candidates: int
    regret: float | None


class Story(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that is known of one request.

    Attributes:
        time: when it came, in seconds since 1970.
        prompt_tokens: as the router counts them: exactly, or by the length of the text.
        status: of the answer; 499: its client left; None: it is still running.
        seconds: until it was over.
        usage: tokens, as the answer told.
    """

    request_id: str
    time: float
    policy: str
    prompt_tokens: int
    attempts: list[Attempt]
    status: int | None
    seconds: float | None
    usage: dict[str, int]
