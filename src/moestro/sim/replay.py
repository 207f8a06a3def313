"""What-if analysis: recorded requests on their recorded engines, simulated under other routing policies.

A record of a shadow says what its policy would change beside the one in use.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import FIGURES, ROUTED_FIGURES
from moestro.core.request import ServiceClass
from moestro.core.rng import Draws
from moestro.core.setting_checks import CheckedSettings
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies
from moestro.errors import ConfigError
from moestro.files.text_files import read_text
from moestro.flow.settings import SteppingSettings
from moestro.routing.policy_contract import Choice, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import Stateless
from moestro.sim.cluster import Arrivals, AtTimes, ClosedLoop, Int64s, think_times
from moestro.sim.figures import REQUESTS_PER_UPDATE, PolicyChange, SimReport, TrafficGroup, block_half_width, outcome_of
from moestro.sim.groups.group_setup import make_prices
from moestro.sim.records import CountedGain, ShadowRecord
from moestro.sim.results import ANSWERED, NOT_YET_NS, Results
from moestro.sim.scenario import Scenario, affinity_notes, make_bounds, run
from moestro.sim.settings import GROUP_MODES, PolicySettings, SimEngineSettings, refuse_unknown
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings
from moestro.workload.progress import progress
from moestro.workload.traces.request_record import ROUTER, Header, RequestRecord

_POLL_MS = 1000.0  # --metrics-interval of `moestro route`


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfSettings:
    """What a replay simulates of a record.

    Attributes:
        policies: routing policies under which it is simulated.
        cost: GPU/NETWORK, qllm/NETWORK, or a table of `moestro calibrate`. None means the device of the record.
        engines: keys of `SimEngineSettings` that replace those of the record.
        is_closed_loop: whether a session's next turn arrives as long after the simulated end of the turn before as
            after the recorded one; otherwise arrivals are as recorded.
    """

    policies: tuple[str, ...] = ()
    cost: str | None = None
    engines: Mapping[str, object] = field(default_factory=dict)
    is_closed_loop: bool = False


def read_engines(path: Path, flag: str = "--engines") -> dict[str, object]:
    """Read the table [engines] of a TOML file; other tables are ignored.

    Args:
        path: the file.
        flag: what names the file, for messages.

    Raises:
        ConfigError: the file cannot be read, has no such table, or the table has an unknown key.
    """
    try:
        table = tomllib.loads(read_text(path)).get("engines")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeError) as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{flag} {path} has no table [engines]")
    refuse_unknown(table, SimEngineSettings, "engines")
    if "table" in table:
        table["table"] = str((path.parent / str(table["table"])).absolute())
    return table


def recorded_engines(record: RequestRecord, settings: WhatIfSettings, num_engines: int) -> SimEngineSettings:
    """Return the engines as far as the record describes them, with the cost of their steps.

    Args:
        num_engines: number of engines to simulate.

    Raises:
        ConfigError: step durations are unknown, a setting is not allowed, or the engines formed a group.
    """
    header = record.header
    if header.stepping.get("mode") in GROUP_MODES:
        raise ConfigError(
            f"the record comes from engines in mode {header.stepping['mode']!r}, and a replay simulates engines that"
            " compute alone: simulate the group by a file with a table [group], see docs/simulator.md"
        )
    recorded: dict[str, object] = {
        "count": num_engines,
        "block_size": header.block_size,
        "num_blocks": header.num_blocks or None,
        "kv_offloading_size": header.kv_offloading_size,
        "max_model_len": header.max_model_len or None,
        **_recorded(header.limits, SchedulerLimits),
        **_in_recorded_blocks(header, settings.engines),
    }
    if settings.cost is not None or not {"gpu", "network", "engine", "table"} & recorded.keys():
        recorded |= _cost(header, settings.cost)
    if recorded["kv_offloading_size"] and "table" in recorded:
        raise ConfigError(
            "this server kept KV of preempted requests in host memory, and a table does not price these copies:"
            " give --cost GPU/NETWORK"
        )
    return _converted(recorded)


def _in_recorded_blocks(header: Header, engines: Mapping[str, object]) -> dict[str, object]:
    """Return the operator's settings with the KV cache in blocks of the record.

    A router's record names blocks of its own size, which may be estimated from texts.
    """
    size, num_blocks = engines.get("block_size"), engines.get("num_blocks")
    if header.device != ROUTER or not isinstance(size, int) or size == header.block_size:
        return dict(engines)
    found = {**engines, "block_size": header.block_size}
    if isinstance(num_blocks, int):
        found["num_blocks"] = max(1, num_blocks * size // header.block_size)
    return found


def _converted(recorded: dict[str, object]) -> SimEngineSettings:
    try:
        return msgspec.convert(recorded, SimEngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--engines: {error}") from None


def recorded_signals(header: Header) -> SignalSettings:
    """Return how load figures reach the router: with each step in a server, by polls of `/metrics` behind a router."""
    figures = tuple(name for name in ROUTED_FIGURES if FIGURES[name].is_from_rank)
    channel = ReportChannel.POLLED if header.device == ROUTER else ReportChannel.PIGGYBACKED
    return SignalSettings(channels=(ChannelSettings(figures=figures, channel=channel, period_ms=_POLL_MS),))


def assumed_engines_note(header: Header, engines: SimEngineSettings, num_blocks: int) -> str | None:
    """Say what is assumed of engines that a router's record does not describe; None for a server's record."""
    if header.device != ROUTER:
        return None
    return (
        f"A router's record has no settings of its engines. Simulated: {engines.count} with {num_blocks:,} blocks of"
        f" {engines.block_size} tokens, max_num_seqs {engines.max_num_seqs}, max_num_batched_tokens"
        f" {engines.max_num_batched_tokens:,}. Give --engines FILE with a table [engines] to change them"
    )


def _cost(header: Header, cost: str | None) -> dict[str, str]:
    if cost is None and header.device.startswith("paced:"):
        source = header.device.removeprefix("paced:")
        cost = source if source.endswith(".json") else f"{source}/{header.model}"
    if cost is None:
        whose = "a router" if header.device == ROUTER else f"a server on {header.device}"
        raise ConfigError(
            f"the record comes from {whose} and holds no step durations: give --cost with the table that"
            " `moestro calibrate` writes on that machine, or --cost GPU/NETWORK, for instance h20/qwen3-30b-a3b"
        )
    if cost.endswith(".json"):
        return {"table": str(Path(cost).absolute())}
    gpu, separator, network = cost.partition("/")
    if not separator:
        raise ConfigError(f"--cost {cost!r} is neither GPU/NETWORK nor a table, FILE.json")
    return {"engine": "qllm", "network": network} if gpu == "qllm" else {"gpu": gpu, "network": network}


def recorded_policy(record: RequestRecord, route: str, title: str) -> PolicySettings:
    """Return the policies of the recorded engines with a routing policy, and the recorded number of routers.

    Args:
        route: name of a routing policy, with settings if any, or the expression of a recorded `--route-score`.
    """
    header = record.header
    recorded = _recorded(header.limits, SchedulerPolicies) | _recorded(header.stepping, SteppingSettings)
    if recorded.get("max_be_wait", 0.0) is None:
        recorded["max_be_wait"] = math.inf  # JSON has no inf
    name = route.partition(":")[0]
    is_score = route == header.route_policy and name not in ROUTE_POLICIES.names() and not name.endswith(".py")
    which = "route_score" if is_score else "route"
    routers = {"routers": record.num_routers, "router_delay_ms": record.router_delay_ms}
    return msgspec.convert({"name": title, which: route, **recorded, **routers}, PolicySettings)


def _recorded(values: Mapping[str, object], kind: type[CheckedSettings]) -> dict[str, object]:
    """Return the values that a header holds for the fields of `kind`."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


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
            for name, figure in _MEANS:
                was, now = getattr(as_it_was.report, figure), getattr(outcome.report, figure)
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


IN_USE = "router in use (simulated)"
_HOUR_NS = 3_600_000_000_000
_MOST_BLOCKS, _FEWEST_BLOCKS, _BLOCK_REQUESTS = 20, 4, 10
_NO_TENANT = "without a tenant"

Floats = NDArray[np.float64]
Rows = NDArray[np.bool_]


class RecordedChoices(Stateless):
    """Sends each request of a record to the engine that it had.

    Args:
        engines: engine of each row of the record.
    """

    def __init__(self, engines: NDArray[np.int32]) -> None:
        self._engines = engines

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the recorded engine."""
        engine = int(self._engines[int(view.request.request_id.removeprefix("row-"))])
        return Choice(engine, 0.0, "as recorded")


@dataclass(frozen=True, slots=True, eq=False)
class ShadowAnswer:
    """What a policy would change.

    Attributes:
        report: figures of both simulations, with the changes in all groups of requests.
        runs: title and results of each simulation.
    """

    report: SimReport
    runs: list[tuple[str, Results]]

    def sentences(self) -> list[str]:
        """Describe the changes of all requests in sentences."""
        sentences = []
        for title, groups in self.report.changes.items():
            whole = groups[0]
            words = [f"{whole.moved:.1%} of the requests would have gone to another engine"]
            for name, change, unit in (("hits", whole.hit_ratio, "%"), ("mean TTFT", whole.ttft_ms, "ms")):
                if change is not None:
                    scale, was, now = (100 if unit == "%" else 1), *change.shown
                    words.append(f"{name} {was * scale:.1f} -> {now * scale:.1f} {unit}")
            sentences.append(f"Under {title}: {', '.join(words)}.")
        return sentences

    def warnings(self) -> list[str]:
        """Name what the simulation of the router in use is too far from."""
        whole = next(iter(self.report.changes.values()))[0].ttft_ms
        if whole is None or whole.measured is None:
            return []
        pair = whole.measured, whole.simulated_before
        if max(pair) <= MOST_OFF * min(pair):
            return []
        text = (
            f"The mean TTFT was {pair[0]:.1f} ms, and its simulation has {pair[1]:.1f}, over {MOST_OFF:g} times apart:"
            " the predicted change is doubtful. Give --cost and --engines what `moestro calibrate --server` writes."
        )
        return [text]


def shadow_what_if(shadow: ShadowRecord, settings: WhatIfSettings) -> ShadowAnswer:
    """Simulate a shadow's record under the recorded choices and under other policies, and compare the two.

    Errors of the model are in both simulations and mostly cancel, so that the change is what is predicted. Measured
    means with the change are the predicted means.

    Raises:
        ConfigError: step durations are unknown, or a policy does not exist.
    """
    record = shadow.record
    if settings.is_closed_loop and not record.session.any():
        raise ConfigError("--closed-loop needs sessions, and no request of the record names one (session_id)")
    own = record.header.route_policy
    engines = recorded_engines(record, settings, record.num_engines)
    scenario = recorded_scenario(record, engines, settings, 0)
    chosen = np.array([each.engine for each in record.requests], np.int32)
    fixed = replace(scenario, route_policy=lambda: RecordedChoices(chosen))
    in_use = recorded_policy(record, "round_robin", IN_USE)
    policies = [recorded_policy(record, name, f"{name} (simulated)") for name in settings.policies or (own,)]
    runs = [(IN_USE, run_shown(fixed, in_use))]
    runs += [(policy.title, run_shown(scenario, policy)) for policy in policies]
    assumed = assumed_engines_note(record.header, engines, scenario.bounds.num_blocks)
    report = SimReport(
        workload=f"{len(record):,} requests of the router in use",
        is_generated=False,
        settings={"headers": msgspec.to_builtins(record.headers), "engines": msgspec.to_builtins(engines)},
        notes=(
            *scenario.prices.notes(),
            *record.notes,
            *([assumed] if assumed else []),
            *affinity_notes(policies, scenario.named),
        ),
        outcomes=tuple(outcome_of(title, results, None) for title, results in runs),
        changes={title: tuple(_groups(shadow, runs[0][1], results)) for title, results in runs[1:]},
    )
    return ShadowAnswer(report, runs)


def _groups(shadow: ShadowRecord, before: Results, after: Results) -> Iterator[TrafficGroup]:
    """Yield the changes of all requests, then of each hour, then of each tenant."""
    rows = before.is_answered & after.is_answered
    yield _group(shadow, "all", rows, before, after, shadow.gain())
    hours = shadow.wall_ns // _HOUR_NS
    if len(np.unique(hours)) > 1:
        for hour in np.unique(hours).tolist():
            begin_ns = hour * _HOUR_NS
            name = datetime.fromtimestamp(begin_ns / 1e9, UTC).strftime("%Y-%m-%d %H:00 UTC")
            gain = shadow.gain(begin_ns, begin_ns + _HOUR_NS)
            yield _group(shadow, name, rows & (hours == hour), before, after, gain)
    tenants = np.array([each.tenant for each in shadow.record.requests])
    if tenants.astype(bool).any():
        for tenant in sorted(set(tenants.tolist())):
            name = f"tenant {tenant}" if tenant else _NO_TENANT
            yield _group(shadow, name, rows & (tenants == tenant), before, after, None)


def _group(
    shadow: ShadowRecord, name: str, rows: Rows, before: Results, after: Results, gain: CountedGain | None
) -> TrafficGroup:
    """Return the changes of the requests in `rows`. Engines do not count by tenant, so those have no `gain`."""
    has_token = rows & (before.num_tokens > 0)
    ttft = np.stack([_ttft_ms(before)[has_token], _ttft_ms(after)[has_token]], axis=1)
    hits = np.stack([before.num_hit_tokens[rows], after.num_hit_tokens[rows], before.num_prompt_tokens[rows]], axis=1)
    logged = _logged_ttft_ms(shadow)[has_token]
    by_log = float(np.nanmean(logged)) if len(logged) and not np.isnan(logged).any() else None
    return TrafficGroup(
        name=name,
        num_requests=int(rows.sum()),
        moved=float((before.engine != after.engine)[rows].mean()) if rows.any() else 0.0,
        hit_ratio=_change(hits.astype(np.float64), _hit_ratios, _difference, None if gain is None else gain.hit_ratio),
        ttft_ms=_change(ttft, _means, _ratio, by_log if by_log is not None or gain is None else gain.ttft_ms),
    )


def _ttft_ms(results: Results) -> Floats:
    times: Floats = (results.first_token_ns - results.arrival_ns) / 1e6
    return times


def _logged_ttft_ms(shadow: ShadowRecord) -> Floats:
    """Return the TTFT that the access log has of each request, ms; NaN where it has none."""
    times = [(each.first_token_ns - each.arrival_ns) / 1e6 for each in shadow.record.requests]
    has_first = np.array([each.first_token_ns > 0 for each in shadow.record.requests])
    return np.where(has_first, times, np.nan)


def _means(sums: Floats, count: int) -> tuple[float, float]:
    return float(sums[0]) / count, float(sums[1]) / count


def _hit_ratios(sums: Floats, count: int) -> tuple[float, float]:
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def _ratio(before: float, after: float) -> float:
    return after / before - 1


def _difference(before: float, after: float) -> float:
    return after - before


def _change(
    values: Floats,
    figures: Callable[[Floats, int], tuple[float, float]],
    compare: Callable[[float, float], float],
    measured: float | None,
) -> PolicyChange | None:
    """Return the change of a figure, with the interval that blocks of consecutive requests give; None without requests.

    Args:
        values: [n, k], what each request adds to the sums.
        figures: the figure before and after, from sums over requests and their number.
        compare: the change from the two.
    """
    if not len(values):
        return None
    sums = values.sum(0)
    before, after = figures(sums, len(values))
    if compare is _ratio and not before:
        return None
    num_blocks = min(_MOST_BLOCKS, len(values) // _BLOCK_REQUESTS)
    half_width = None
    if num_blocks >= _FEWEST_BLOCKS:
        blocks = np.array_split(values, num_blocks)
        without = [compare(*figures(sums - each.sum(0), len(values) - len(each))) for each in blocks]
        half_width = block_half_width(without)
    change = compare(before, after)
    predicted = None
    if measured is not None:
        predicted = measured * (1 + change) if compare is _ratio else min(max(measured + change, 0.0), 1.0)
    return PolicyChange(
        measured=measured,
        predicted=predicted,
        simulated_before=before,
        simulated_after=after,
        change=change,
        half_width=half_width,
    )
