"""What-if analysis: recorded requests of servers or of a router, simulated under other routing policies."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.core.request import ServiceClass
from moestro.errors import ConfigError
from moestro.sim.engine_prices import make_prices
from moestro.sim.figures.outcome import SimReport, outcome_of
from moestro.sim.figures.results import ANSWERED, NOT_YET_NS, Results
from moestro.sim.figures.show import REQUESTS_PER_UPDATE
from moestro.sim.load.arrivals import Arrivals, AtTimes, ClosedLoop, Int64s, think_times
from moestro.sim.load.recorded_engines import (
    WhatIfSettings,
    assumed_engines_note,
    recorded_engines,
    recorded_policy,
    recorded_signals,
)
from moestro.sim.scenario import Scenario, affinity_notes, make_bounds, run
from moestro.sim.settings import PolicySettings, SimEngineSettings
from moestro.workload.progress import progress
from moestro.workload.traces.request_record import RequestRecord

RECORDED = "recorded"
# A mean that the simulation of the recorded run misses by a larger factor is not compared. In 15 runs of our own server
# the largest factor was 1.8 (docs/simulator.md, fidelity).
MOST_OFF = 2.0
_MEANS = (("mean TTFT", "ttft_ms"), ("mean TPOT", "tpot_ms"))


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """Outcome of a replay.

    Attributes:
        report: figures of the recorded run, of its simulation, and of each other policy's simulation.
        runs: title and results of each of these.
        moved: share of requests that each other policy sends to another engine than the recorded policy does, both
            simulated, by the policy's title.
    """

    report: SimReport
    runs: list[tuple[str, Results]]
    moved: dict[str, float]

    def sentences(self) -> list[str]:
        """Describe the changes in sentences. Simulations are compared with each other, so that model errors cancel."""
        as_it_was, doubtful = self.report.outcomes[1], self._doubtful()
        sentences = []
        for outcome in self.report.outcomes[2:]:
            words = [f"{self.moved[outcome.title]:.1%} of the requests would have gone to another engine"]
            for name, field in _MEANS:
                was, now = getattr(as_it_was.report, field), getattr(outcome.report, field)
                if was is not None and now is not None and name not in doubtful:
                    words.append(f"{name} {was.mean:.1f} -> {now.mean:.1f} ms ({now.mean / was.mean - 1:+.1%})")
            hits = as_it_was.report.cached_share, outcome.report.cached_share
            sentences.append(f"Under {outcome.title}: {', '.join(words)}, hit ratio {hits[0]:.3f} -> {hits[1]:.3f}.")
        return sentences

    def warnings(self) -> list[str]:
        """Name the means that are not compared, because the simulation of the recorded run is too far from them."""
        return [
            f"The {name} is not compared: the record has {recorded:.1f} ms, its simulation {simulated:.1f}, over"
            f" {MOST_OFF:g} times apart. Give --cost a table that `moestro calibrate` writes on the recorded machine."
            for name, (recorded, simulated) in self._doubtful().items()
        ]

    def _doubtful(self) -> dict[str, tuple[float, float]]:
        """Return the recorded and the simulated mean of each quantity that the simulation misses, in ms."""
        recorded, as_it_was = self.report.outcomes[:2]
        means = {
            name: (was.mean, now.mean)
            for name, field in _MEANS
            if (was := getattr(recorded.report, field)) and (now := getattr(as_it_was.report, field))
        }
        return {name: pair for name, pair in means.items() if max(pair) > MOST_OFF * min(pair)}


def what_if(record: RequestRecord, settings: WhatIfSettings) -> WhatIf:
    """Simulate `record` under its own and under other routing policies.

    Records of several servers are simulated as they were, each server alone, and then as one pool of engines behind
    one router.

    Raises:
        ConfigError: step durations are unknown, a policy does not exist, the engines formed a group, or the loop is to
            be closed and no request names a session.
    """
    if settings.is_closed_loop and not record.session.any():
        raise ConfigError("--closed-loop needs sessions, and no request of the record names one (session_id)")
    if len(record.headers) > 1 and "count" in settings.engines:
        raise ConfigError("--engines: the engines of several servers are counted from their records: drop count")
    own = record.header.route_policy
    engines = recorded_engines(record, settings, record.num_engines)
    scenario = recorded_scenario(record, engines, settings, 0)
    runs = [(RECORDED, recorded_results(record)), _as_it_was(record, settings)]
    names = [name for name in dict.fromkeys(settings.policies) if name != own or len(record.headers) > 1]
    others = [recorded_policy(record, name, f"{name} (simulated)") for name in names]
    runs += [(policy.title, run_shown(scenario, policy)) for policy in others]
    policies = [recorded_policy(record, own, own), *others]
    assumed = assumed_engines_note(record.header, engines, scenario.bounds.num_blocks)
    report = SimReport(
        workload=scenario.source,
        is_generated=False,
        settings={"headers": msgspec.to_builtins(record.headers), "engines": msgspec.to_builtins(engines)},
        notes=(
            *scenario.prices.notes(),
            *record.notes,
            *([assumed] if assumed else []),
            *affinity_notes(policies, scenario.named),
        ),
        outcomes=tuple(outcome_of(title, results, None) for title, results in runs),
    )
    base = runs[1][1]
    return WhatIf(report, runs, {title: float((each.engine != base.engine).mean()) for title, each in runs[2:]})


def _as_it_was(record: RequestRecord, settings: WhatIfSettings) -> tuple[str, Results]:
    """Simulate each server alone under the recorded policy. Return a title and the results."""
    policy = recorded_policy(record, record.header.route_policy, f"{record.header.route_policy} (simulated)")
    if len(record.headers) == 1:
        return policy.title, run_shown(
            recorded_scenario(record, recorded_engines(record, settings, record.num_engines), settings, 0), policy
        )
    whole, first_engine = Results(len(record), record.num_engines), 0
    for server, header in enumerate(record.headers):
        part = record.part(server)
        begin_ns = part.requests[0].arrival_ns - record.requests[0].arrival_ns
        engines = recorded_engines(part, settings, header.num_engines)
        results = run_shown(recorded_scenario(part, engines, settings, begin_ns), policy)
        whole.place(np.flatnonzero(record.server == server), first_engine, results)
        first_engine += header.num_engines
    return f"{record.header.route_policy} on each server (simulated)", whole


def run_shown(scenario: Scenario, policy: PolicySettings) -> Results:
    """Run a scenario under a policy, with a progress bar."""
    with progress(policy.title, len(scenario.workload), REQUESTS_PER_UPDATE) as advance:
        return run(scenario, policy, advance)


def recorded_scenario(
    record: RequestRecord, engines: SimEngineSettings, settings: WhatIfSettings, begin_ns: int
) -> Scenario:
    """Return the scenario of a record, whose first request arrives at `begin_ns`."""
    num_servers = len(record.headers)
    where = f" by {num_servers} servers" if num_servers > 1 else ""
    requests = record.requests
    return Scenario(
        workload=record,
        arrivals=_arrivals(record, begin_ns, is_closed_loop=settings.is_closed_loop),
        engines=engines,
        bounds=make_bounds(engines),
        prices=make_prices(engines),
        source=f"{len(record):,} requests recorded{where} under {record.header.route_policy}",
        is_generated=False,
        signals=recorded_signals(record.header),
        named={
            "session_id": record.session != 0,
            "user": np.array([request.user != 0 for request in requests], np.bool_),
        },
    )


def _arrivals(record: RequestRecord, begin_ns: int, *, is_closed_loop: bool) -> Arrivals:
    arrival_ns: Int64s = record.arrival_ns + begin_ns
    if not is_closed_loop:
        return AtTimes(arrival_ns)
    took_ns = np.array([max(each.last_token_ns - each.arrival_ns, 0) for each in record.requests], np.int64)
    session = np.unique(record.session, return_inverse=True)[1]
    strangers = np.flatnonzero(record.session == 0)
    session[strangers] = len(record) + strangers  # a request without a session is one of its own
    return ClosedLoop(session, arrival_ns, think_times(session, arrival_ns, arrival_ns + took_ns))


def recorded_results(record: RequestRecord) -> Results:
    """Turn a record into results that can stand beside simulated ones.

    A server's record holds no end time for a scored prompt, which has no output tokens. Here the request ends at
    admission.
    """
    results = Results(len(record), record.num_engines, tells_prefill=False)
    requests, start_ns = record.requests, record.requests[0].arrival_ns
    for name in ("arrival_ns", "first_token_ns", "last_token_ns"):
        getattr(results, name)[:] = [getattr(request, name) - start_ns for request in requests]
    for column, name in (
        (results.admitted_ns, "admitted_ns"),
        (results.num_prompt_tokens, "num_prompt_tokens"),
        (results.num_tokens, "num_output_tokens"),
        (results.num_hit_tokens, "num_hit_tokens"),
        (results.engine, "engine"),
    ):
        column[:] = [getattr(request, name) for request in requests]
    is_admitted = results.admitted_ns != 0  # a router does not know
    results.admitted_ns[is_admitted] -= start_ns
    results.admitted_ns[~is_admitted] = NOT_YET_NS
    results.num_preemptions[:] = record.num_preemptions
    results.is_best_effort[:] = np.array([request.service_class is ServiceClass.BE for request in requests])
    is_scored = results.num_tokens == 0
    results.first_token_ns[is_scored] = NOT_YET_NS
    has_no_end = is_scored & (results.last_token_ns < results.arrival_ns)
    results.last_token_ns[has_no_end] = np.maximum(results.admitted_ns, results.arrival_ns)[has_no_end]
    results.status[:] = ANSWERED
    return results
