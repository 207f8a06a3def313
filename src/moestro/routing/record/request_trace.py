"""Trace of one request through all levels, readable for people: engines, queue, preemptions, experts and outcome."""

from __future__ import annotations

import msgspec

from moestro.core.scheduling_events import ExpertsMoved, ExpertVisits, RequestEvent


class ScoredEngine(msgspec.Struct, frozen=True):
    """A candidate engine. A lower score is better; None means the policy computes no scores.

    Attributes:
        hit_tokens: prompt tokens that its cache was expected to hold, in any tier.
        host_tokens: those of them in host memory alone.
        speed, decode_speed: speed of prompts and answers against the mean engine, as configured or learnt.
    """

    engine: str
    score: float | None
    hit_tokens: int
    host_tokens: int = 0
    speed: float = 1.0
    decode_speed: float = 1.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One decision for a request. Further attempts follow when an engine fails before it responds.

    Attributes:
        engine: name of the chosen engine.
        because: reason for a further attempt; empty for the first.
        wait_s: wait in the router's queue, seconds.
        candidates: candidate engines, best first, including the chosen one.
        num_candidates: number of candidates, of which the list may contain only the best.
        regret: the value of `Candidates.regret`.
        not_compared: figures by which no engine was compared, each with engines that have not reported it.
        peer_ages_s: age of what the router knew of each other router, seconds.
    """

    engine: str
    score: float | None
    reason: str
    because: str
    hit_tokens: int
    candidates: list[ScoredEngine]
    num_candidates: int
    regret: float | None
    not_compared: dict[str, list[str]] = {}
    wait_s: float = 0.0
    peer_ages_s: dict[str, float] = {}


class EngineEvent(msgspec.Struct, frozen=True):
    """What the scheduler of an engine did with the request."""

    engine: str
    event: RequestEvent


class EngineVisits(msgspec.Struct, frozen=True):
    """Workers that computed the request's experts while it was on an engine."""

    engine: str
    visits: tuple[ExpertVisits, ...]


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server of a trace, as far as its traces have to be understood.

    Attributes:
        mode: mode of `moestro serve`.
        order, evict: policies of each engine's scheduler.
        num_experts: routed experts of a layer; 0 means a dense network.
        expert_workers: names of the workers that count as devices of experts, in the order of `ExpertVisits.num_pairs`.
            Empty where each engine computes all experts itself.
        is_paced: whether devices are modelled, so that no device computes experts.
    """

    mode: str
    order: str
    evict: str
    num_experts: int
    expert_workers: tuple[str, ...] = ()
    is_paced: bool = False


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="Story"):
    """Everything known about one request. The fields after `usage` are those of `moestro serve`.

    Attributes:
        time: time of arrival, seconds since 1970.
        prompt_tokens: prompt length as counted by the router, exact or estimated from the text.
        status: status of the response. 499 means that the client disconnected; None means still running.
        seconds: time from arrival to the end, seconds; None means still running.
        usage: token counts reported by the response.
        not_resumable: why its stream could not go on elsewhere; empty where it could, or without --resume-streams.
        arrival_ns: arrival on the clock of `events` and `moves`; None means that there are none.
        service_class, priority: as requested.
        server: the server; None means a router, whose servers have records of their own.
        events: what the schedulers of its engines did with it, in order; the last ones are missing if there are many.
        num_omitted_events: number of those that are missing.
        visits: workers that computed its experts, by engine.
        moves: changes of the expert table while the request was under way.
        first_token_ns: time of the first token, on the clock of `events`; None means that none came.
        tenant: tenant of the request's key; empty if it has none.
        traceparent: context of the client's span; empty if there is none, or spans are not recorded.
        served_by: engine of the router in use, beside which this one is a shadow; empty if this router is no shadow.
    """

    request_id: str
    time: float
    policy: str
    prompt_tokens: int
    attempts: list[Attempt]
    status: int | None
    seconds: float | None
    usage: dict[str, int]
    not_resumable: str = ""
    arrival_ns: int | None = None
    service_class: str = ""
    priority: int = 0
    server: ServerFacts | None = None
    events: list[EngineEvent] = []
    num_omitted_events: int = 0
    visits: list[EngineVisits] = []
    moves: list[ExpertsMoved] = []
    first_token_ns: int | None = None
    tenant: str = ""
    traceparent: str = ""
    served_by: str = ""
