"""What-if analysis: a server's recorded requests, simulated under other routing policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import numpy as np

from moestro.core.request import ServiceClass
from moestro.core.setting_checks import CheckedSettings
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies
from moestro.errors import ConfigError
from moestro.flow.settings import SteppingSettings
from moestro.sim.arrivals import AtTimes
from moestro.sim.engine_prices import make_prices
from moestro.sim.group_settings import GROUP_MODES
from moestro.sim.outcome import SimReport, outcome_of
from moestro.sim.results import ANSWERED, NOT_YET_NS, Results
from moestro.sim.scenario import Scenario, make_bounds, run
from moestro.sim.settings import PolicySettings, SimEngineSettings
from moestro.sim.show import REQUESTS_PER_UPDATE
from moestro.workload.progress import progress
from moestro.workload.request_record import Header, RequestRecord

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
        said = []
        for outcome in self.report.outcomes[2:]:
            words = [f"{self.moved[outcome.title]:.1%} of the requests would have gone to another engine"]
            for name, field in _MEANS:
                was, now = getattr(as_it_was.report, field), getattr(outcome.report, field)
                if was is not None and now is not None and name not in doubtful:
                    words.append(f"{name} {was.mean:.1f} -> {now.mean:.1f} ms ({now.mean / was.mean - 1:+.1%})")
            hits = as_it_was.report.cached_share, outcome.report.cached_share
            said.append(f"Under {outcome.title}: {', '.join(words)}, hit ratio {hits[0]:.3f} -> {hits[1]:.3f}.")
        return said

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


def what_if(record: RequestRecord, policies: Sequence[str], cost: str | None) -> WhatIf:
    """Replay `record` under its own and under other routing policies.

    Args:
        record: requests of a server.
        policies: names of routing policies.
        cost: GPU/NETWORK, qllm/NETWORK, or a table of `moestro calibrate`. None means the device of the record.

    Raises:
        ConfigError: step durations are unknown, a policy does not exist, or the engines formed a group.
    """
    header = record.header
    if header.stepping.get("mode") in GROUP_MODES:
        raise ConfigError(
            f"the record comes from engines in mode {header.stepping['mode']!r}, and a replay simulates engines that"
            " compute alone: simulate the group by a file with a table [group], see docs/simulator.md"
        )
    engines = _engines(header, cost)
    chosen = tuple(_policy(header, name) for name in dict.fromkeys((header.route_policy, *policies)))
    scenario = Scenario(
        workload=record,
        arrivals=AtTimes(record.arrival_ns),
        engines=engines,
        bounds=make_bounds(engines),
        prices=make_prices(engines),
        source=f"{len(record):,} requests recorded under {header.route_policy}",
        is_generated=False,
    )
    runs = [(RECORDED, recorded_results(record))]
    for policy in chosen:
        with progress(policy.title, len(record), REQUESTS_PER_UPDATE) as advance:
            runs.append((policy.title, run(scenario, policy, advance)))
    report = SimReport(
        workload=scenario.source,
        is_generated=False,
        settings={"header": msgspec.to_builtins(header), "engines": msgspec.to_builtins(engines)},
        notes=tuple(scenario.prices.notes()),
        outcomes=tuple(outcome_of(title, results, None) for title, results in runs),
    )
    base = runs[1][1]
    return WhatIf(report, runs, {title: float((each.engine != base.engine).mean()) for title, each in runs[2:]})


def recorded_results(record: RequestRecord) -> Results:
    """Turn a record into results that can stand beside simulated ones.

    A record holds no end time for a scored prompt, which has no output tokens. Here the request ends at admission.
    """
    results = Results(len(record), record.header.num_engines, tells_prefill=False)
    requests, start_ns = record.requests, record.requests[0].arrival_ns
    for name in ("arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns"):
        getattr(results, name)[:] = [getattr(request, name) - start_ns for request in requests]
    for column, name in (
        (results.num_prompt_tokens, "num_prompt_tokens"),
        (results.num_tokens, "num_output_tokens"),
        (results.num_hit_tokens, "num_hit_tokens"),
        (results.engine, "engine"),
    ):
        column[:] = [getattr(request, name) for request in requests]
    results.is_best_effort[:] = np.array([request.service_class is ServiceClass.BE for request in requests])
    is_scored = results.num_tokens == 0
    results.first_token_ns[is_scored] = NOT_YET_NS
    results.last_token_ns[is_scored] = results.admitted_ns[is_scored]
    results.status[:] = ANSWERED
    return results


def _engines(header: Header, cost: str | None) -> SimEngineSettings:
    """Return the server's engines as far as the record describes them, with the cost of their steps."""
    told = {
        "count": header.num_engines,
        "block_size": header.block_size,
        "num_blocks": header.num_blocks,
        "kv_offloading_size": header.kv_offloading_size,
        "max_model_len": header.max_model_len,
        **_recorded(header.limits, SchedulerLimits),
        **_cost(header, cost),
    }
    if header.kv_offloading_size and "table" in told:
        raise ConfigError(
            "this server kept KV of preempted requests in host memory, and a table does not price these copies:"
            " give --cost GPU/NETWORK"
        )
    return msgspec.convert(told, SimEngineSettings)


def _cost(header: Header, cost: str | None) -> dict[str, str]:
    if cost is None and header.device.startswith("paced:"):
        source = header.device.removeprefix("paced:")
        cost = source if source.endswith(".json") else f"{source}/{header.model}"
    if cost is None:
        raise ConfigError(
            f"the record comes from a server on {header.device} and holds no step durations: give --cost with the"
            " table that `moestro calibrate` writes on that machine, or --cost GPU/NETWORK, for instance"
            " h20/qwen3-30b-a3b"
        )
    if cost.endswith(".json"):
        return {"table": str(Path(cost).absolute())}
    gpu, separator, network = cost.partition("/")
    if not separator:
        raise ConfigError(f"--cost {cost!r} is neither GPU/NETWORK nor a table, FILE.json")
    return {"engine": "qllm", "network": network} if gpu == "qllm" else {"gpu": gpu, "network": network}


def _policy(header: Header, route: str) -> PolicySettings:
    told = _recorded(header.limits, SchedulerPolicies) | _recorded(header.stepping, SteppingSettings)
    if told.get("max_be_wait", 0.0) is None:
        told["max_be_wait"] = math.inf  # JSON has no inf
    return msgspec.convert({"name": f"{route} (simulated)", "route": route, **told}, PolicySettings)


def _recorded(values: Mapping[str, object], kind: type[CheckedSettings]) -> dict[str, object]:
    """Return the values that a header holds for the fields of `kind`."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}
