"""Builds a simulation from its settings: the workload, the engines, the router; and the load that saturates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_MS, NS_PER_S, to_ns
from moestro.core.setting_checks import fields_of
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import GIB, gpu_named, kv_blocks
from moestro.cost.model import PopularityForm
from moestro.engine.registry import ORDER_POLICIES
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies, SchedulerSettings
from moestro.errors import ConfigError
from moestro.routing.policy_contract import RouteInputs, RoutePolicy, unnamed_note
from moestro.routing.registry import ANY_INPUTS, policy_from
from moestro.routing.route_queue import NO_QUEUE, SaturationRules
from moestro.routing.router import Router
from moestro.routing.scoring import priced_ttft
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import (
    Arrivals,
    AtTimes,
    ClosedLoop,
    Cluster,
    OutsideTime,
    SimulatedQueue,
    Workload,
    think_times,
)
from moestro.sim.groups.group import Group, Prices, Ranks
from moestro.sim.groups.group_setup import (
    GroupSetup,
    kv_token_bytes,
    make_group_setup,
    make_prices,
    network_of,
    stage_cost,
)
from moestro.sim.groups.worker_group import StagedRank
from moestro.sim.results import GroupFigures, Results
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import AT_ONCE, RouterFleet, RouterLinks, SignalSettings
from moestro.workload.generated.draws import at_rate, constant, draw_shape, gamma, poisson, replay, weibull
from moestro.workload.generated.sessions import SHAPES, Pace, Sessions, steady_sessions
from moestro.workload.rows import Int64s, RequestForm, RequestMaker, Rows, equal_rows, labelled
from moestro.workload.traces.reading import read_trace

_ARRIVALS, _SHAPE = range(2)  # random streams of a seed


def make_workload(settings: WorkloadSettings, directory: Path, seed: int) -> tuple[Rows, Arrivals]:
    """Make the requests and their arrival times.

    Args:
        settings: settings of the workload.
        directory: directory of relative paths.
        seed: random seed.

    Raises:
        ConfigError: a name is unknown, or a file cannot be read.
    """
    if settings.sessions is not None:
        if settings.sessions not in SHAPES:
            raise ConfigError(f"[workload] unknown sessions {settings.sessions!r}; known: {', '.join(SHAPES)}")
        assert settings.num_requests is not None, "checked by the settings"
        assert settings.rate is not None, "checked by the settings"
        sessions = steady_sessions(SHAPES[settings.sessions], settings.num_requests, settings.rate, seed)
        return _labelled(sessions.rows, settings, seed), sessions
    rows = _rows(settings, directory)
    if settings.shape is not None:
        rng = np.random.default_rng([seed, _SHAPE])
        rows = draw_shape(rows, settings.shape, settings.num_requests or len(rows), rng)
    times = _times(rows, settings, np.random.default_rng([seed, _ARRIVALS]))
    arrivals = _closed_loop(rows, settings, times) if settings.closed_loop else AtTimes(times)
    return _labelled(rows, settings, seed), arrivals


def describe(settings: WorkloadSettings) -> str:
    """Describe the workload in a few words."""
    if settings.trace is not None:
        source = Path(settings.trace).name
    elif settings.sessions is not None:
        source = f"{settings.sessions} sessions"
    else:
        source = f"requests of {settings.prompt_tokens} and {settings.output_tokens} tokens"
    end_s = None if settings.duration_s is None else settings.start_s + settings.duration_s
    words = [
        source,
        f"{settings.start_s:g} s to {'its end' if end_s is None else f'{end_s:g} s'}" if settings.has_window else "",
        f"{settings.shape} shape" if settings.shape else "",
        "closed loop" if settings.closed_loop else "",
        f"{settings.rate:.4g} requests/s" if settings.rate else "",
    ]
    return ", ".join(word for word in words if word)


def workload_notes(settings: WorkloadSettings, rows: Rows) -> list[str]:
    """Note what of a trace is not in its requests, and that it has fewer requests than the settings ask for."""
    notes = [f"[workload] trace: {note}" for note in rows.notes]
    if settings.num_requests is not None and settings.num_requests > len(rows):
        what = "the part of the trace" if settings.has_window else "the trace"
        notes.append(f"[workload] num_requests = {settings.num_requests:,}, and {what} has {len(rows):,} requests")
    return notes


def _rows(settings: WorkloadSettings, directory: Path) -> Rows:
    if settings.trace is not None:
        reads_all = settings.shape is not None or settings.has_window
        rows = read_trace(directory / settings.trace, None if reads_all else settings.num_requests)
        return _window(rows, settings) if settings.has_window else rows
    assert settings.num_requests is not None, "checked by the settings"
    assert settings.prompt_tokens is not None, "checked by the settings"
    assert settings.output_tokens is not None, "checked by the settings"
    return equal_rows(settings.num_requests, settings.prompt_tokens, settings.output_tokens)


def _window(rows: Rows, settings: WorkloadSettings) -> Rows:
    """Select the part of a trace that the settings name, and its first `num_requests` requests."""
    if rows.timestamp_ns is None:
        raise ConfigError("[workload] start_s and duration_s need a trace with times, and this one has none")
    since_ns = rows.timestamp_ns - rows.timestamp_ns[0]
    begin_ns = to_ns(settings.start_s)
    is_inside = since_ns >= begin_ns
    if settings.duration_s is not None:
        is_inside &= since_ns < begin_ns + to_ns(settings.duration_s)
    inside = np.flatnonzero(is_inside)
    if not len(inside):
        raise ConfigError(
            f"[workload] no request of the trace, which lasts {since_ns[-1] / NS_PER_S:,.1f} s, is in the part from"
            f" start_s = {settings.start_s:g} on"
        )
    return rows.select(inside if settings.shape else inside[: settings.num_requests])


def _closed_loop(rows: Rows, settings: WorkloadSettings, times: Int64s) -> ClosedLoop:
    """Let turns follow answers. Conversations begin at the times of their first turns."""
    if rows.session is None:
        raise ConfigError(
            "[workload] closed_loop needs a trace with conversations (Bailian, BurstGPT with Session ID), and this one"
            " names none"
        )
    if settings.think_s is not None:
        return ClosedLoop(rows.session, times, np.full(len(rows), to_ns(settings.think_s)))
    if rows.timestamp_ns is None:
        raise ConfigError("[workload] closed_loop needs a trace with times, or think_s")
    ended_ns = rows.timestamp_ns + Pace().service_ns(rows.num_output_tokens)
    return ClosedLoop(rows.session, times, think_times(rows.session, rows.timestamp_ns, ended_ns))


def _labelled(rows: Rows, settings: WorkloadSettings, seed: int) -> Rows:
    return rows if settings.ls_share is None else labelled(rows, settings.ls_share, seed)


def _times(rows: Rows, settings: WorkloadSettings, rng: np.random.Generator) -> Int64s:
    pattern, rate, count = settings.arrivals, settings.rate, len(rows)
    if pattern is None:
        pattern = "trace" if rows.timestamp_ns is not None else "poisson"
    if pattern == "trace":
        if rows.timestamp_ns is None:
            raise ConfigError("[workload] the workload has no recorded times: give arrivals = 'poisson' and a rate")
        times = replay(rows.timestamp_ns, rng)
        return times if rate is None else at_rate(times, rate)
    if rate is None:
        raise ConfigError("[workload] the workload has no recorded times: give a rate, in requests a second")
    if pattern == "constant":
        return constant(count, rate)
    if pattern == "gamma":
        return gamma(count, rate, settings.burstiness, rng)
    if pattern == "weibull":
        return weibull(count, rate, settings.burstiness, rng)
    return poisson(count, rate, rng)


OnArrival = Callable[[], None] | None

_DOMAIN_DRAWS = 1  # separates the draws of requests' domains from others of the same seed


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A workload and its engines, ready to run under any policies.

    Attributes:
        workload: requests.
        arrivals: their arrival times.
        engines: settings of the engines.
        bounds: scheduler settings of each rank, except its policies and its KV blocks, which the mode decides.
        prices: durations of an engine's steps in `fused` mode.
        source: short description of the workload, for titles.
        is_generated: whether a generator made the requests; otherwise they were recorded. Results say so.
        named: whether each request names its session and its user, bool[n], by the names of `routing.request_names`.
        signals: signals that reach the router, unless a policy sets its own.
        route_policy: makes the routing policy in place of the one that a combination names; None means that one.
        group: groups of workers, for the modes that need them.
        popularity: popularity of the experts. None means that of the prices.
        seed: random seed of the router and of drawn experts.
        notes: what of the workload's trace is not in its requests.
    """

    workload: Workload
    arrivals: Arrivals
    engines: SimEngineSettings
    bounds: SchedulerSettings
    prices: Prices
    source: str
    is_generated: bool
    named: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    signals: SignalSettings = AT_ONCE
    route_policy: Callable[[], RoutePolicy] | None = None
    group: GroupSetup | None = None
    popularity: PopularityForm | None = None
    seed: int = 0
    notes: tuple[str, ...] = ()


def make_scenario(settings: SimSettings, directory: Path) -> Scenario:
    """Build the scenario that `settings` describe.

    Args:
        settings: settings of the simulation.
        directory: directory of relative paths.

    Raises:
        ConfigError: a name is unknown, a file cannot be read, or a request exceeds the limit of an engine.
    """
    rows, arrivals = make_workload(settings.workload, directory, settings.seed)
    if settings.popularity is not None and settings.popularity.num_domains > 1 and rows.domain is None:
        draws = np.random.default_rng([settings.seed, _DOMAIN_DRAWS])
        rows = replace(rows, domain=draws.integers(settings.popularity.num_domains, size=len(rows)))
    form = RequestForm(
        block_size=settings.engines.block_size,
        max_tokens=settings.workload.max_tokens,
        names_blocks=settings.engines.enable_prefix_caching,
    )
    group = make_group_setup(settings)
    num_blocks = min(num_kv_blocks(settings.engines, group, policy) for policy in settings.policies)
    workload, bounds = RequestMaker(rows, form), make_bounds(settings.engines, num_blocks, directory)
    _check_fit(workload, bounds.max_model_len)
    return Scenario(
        workload=workload,
        arrivals=arrivals,
        engines=settings.engines,
        bounds=bounds,
        prices=make_prices(settings.engines, directory, settings.popularity),
        source=describe(settings.workload),
        notes=tuple(workload_notes(settings.workload, rows)),
        is_generated=rows.is_generated,
        named={
            "session_id": np.full(len(rows), rows.session is not None),
            "user": np.full(len(rows), rows.user is not None),
        },
        signals=settings.signals,
        group=group,
        popularity=settings.popularity,
        seed=settings.seed,
    )


def _check_fit(workload: RequestMaker, max_model_len: int) -> None:
    """Raise ConfigError if an engine would refuse a request, because policies must serve the same requests."""
    num_tokens = workload.rows.num_prompt_tokens + workload.max_tokens
    too_long = np.flatnonzero(num_tokens > max_model_len)
    if len(too_long):
        row = int(too_long[num_tokens[too_long].argmax()])
        raise ConfigError(
            f"{len(too_long)} of {len(workload)} requests never fit into an engine, whose limit is {max_model_len:,}"
            f" tokens of prompt and output. The longest, row {row}, has a prompt of"
            f" {int(workload.rows.num_prompt_tokens[row]):,} and asks for up to {workload.max_tokens:,} more. Raise"
            " [engines] max_model_len or num_blocks, lower [workload] max_tokens, or remove such rows"
        )


def num_kv_blocks(engines: SimEngineSettings, group: GroupSetup | None, policy: PolicySettings) -> int:
    """Return the KV blocks of each rank under a policy: as set, or as many as fit beside its weights.

    Raises:
        ConfigError: none fits.
    """
    if policy.has_group:
        from moestro.sim.groups.group_builder import group_kv_blocks  # noqa: PLC0415 - only groups take the time

        assert group is not None, "checked by the settings"
        return group_kv_blocks(group, policy)
    return _engine_kv_blocks(engines)


def _engine_kv_blocks(engines: SimEngineSettings) -> int:
    return engines.num_blocks or kv_blocks(
        network_of(engines),
        gpu_named(engines.gpu),
        engines.block_size,
        gpu_memory_utilization=engines.gpu_memory_utilization,
        num_ep_ranks=engines.ep_ranks,
    )


def make_bounds(
    engines: SimEngineSettings, num_blocks: int | None = None, directory: Path = Path()
) -> SchedulerSettings:
    """Return the scheduler settings of each rank, except its policies.

    Args:
        engines: settings of the engines.
        num_blocks: KV blocks of a rank. None means as many as an engine has that computes alone.
        directory: directory of relative paths.

    Raises:
        ConfigError: the engines have host memory, and their table does not say what a copy costs.
    """
    num_blocks = num_blocks or _engine_kv_blocks(engines)
    block_bytes = round(kv_token_bytes(engines, directory) * engines.block_size)
    return SchedulerSettings(
        num_blocks=num_blocks,
        num_host_blocks=int(engines.kv_offloading_size * GIB) // block_bytes if engines.kv_offloading_size else 0,
        block_bytes=block_bytes,
        block_size=engines.block_size,
        max_model_len=engines.max_model_len or num_blocks * engines.block_size,
        **fields_of(engines, SchedulerLimits),
    )


def run(scenario: Scenario, policy: PolicySettings, on_arrival: OnArrival = None) -> Results:
    """Run the scenario under one combination of policies.

    Raises:
        ConfigError: the policy does not exist, or one of its settings is out of range.
    """
    return run_with_figures(scenario, policy, on_arrival)[0]


def run_with_figures(
    scenario: Scenario, policy: PolicySettings, on_arrival: OnArrival = None
) -> tuple[Results, GroupFigures | None]:
    """Run the scenario as `run` does, and also return the figures of its groups of workers, if the mode has them."""
    policy.check_engines(scenario.engines, None if scenario.group is None else scenario.group.group)
    bounds = replace(
        scenario.bounds,
        num_blocks=num_kv_blocks(scenario.engines, scenario.group, policy),
        max_num_urgent_seqs=policy.num_urgent_seqs(scenario.bounds.max_num_seqs),
        **fields_of(policy, SchedulerPolicies),
    )
    if not policy.has_group:
        alone = [_make_ranks(bounds, scenario, policy) for _ in range(scenario.engines.count)]
        return _serve(alone, bounds, scenario, policy, on_arrival), None
    # All of live placement comes with these, and a simulation of engines that compute alone needs none of it.
    from moestro.sim.groups.group_builder import make_group  # noqa: PLC0415
    from moestro.sim.groups.group_figures import group_figures  # noqa: PLC0415

    assert scenario.group is not None, "checked by the settings"
    groups = [make_group(scenario.group, policy, bounds, number) for number in range(scenario.engines.count)]
    results = _serve(groups, bounds, scenario, policy, on_arrival)
    return results, group_figures(scenario.group, policy, groups, results)


def make_route_policy(policy: PolicySettings, inputs: RouteInputs = ANY_INPUTS) -> RoutePolicy:
    """Make the routing policy of a combination.

    Raises:
        ConfigError: no such policy exists, a setting of it is wrong, or it requires what `inputs` lack.
    """
    return policy_from(policy.route, policy.route_score, inputs)


def affinity_notes(policies: Sequence[PolicySettings], named: Mapping[str, NDArray[np.bool_]]) -> list[str]:
    """Name the policies that go by sessions or users which requests lack.

    Args:
        named: whether each request names its session and its user, bool[n], by the names of `routing.request_names`.
    """
    notes = (unnamed_note(policy.title, make_route_policy(policy), named) for policy in policies)
    return [note for note in notes if note is not None]


def _serve(
    groups: Sequence[Ranks],
    bounds: SchedulerSettings,
    scenario: Scenario,
    policy: PolicySettings,
    on_arrival: OnArrival,
) -> Results:
    for group in groups:
        for seat in group.seats:
            seat.has_prompt_kv = scenario.engines.dummy_kv

    def make_router() -> Router:
        route_policy = (
            make_route_policy(policy, route_inputs(scenario, policy))
            if scenario.route_policy is None
            else scenario.route_policy()
        )
        router = Router(route_policy, RouterSettings(block_size=bounds.block_size, seed=scenario.seed))
        for number, group in enumerate(groups):
            own = number if group.steps_together else None
            spec = EngineSpec(num_blocks=bounds.num_blocks, num_host_blocks=bounds.num_host_blocks, group=own)
            for _ in group.seats:
                router.set_routable(router.add_engine(spec), routable=True)
        return router

    signals = policy.signals or scenario.signals
    engines = scenario.engines
    outside = OutsideTime(engines.api_us * 1e3, engines.api_token_us * 1e3)
    if policy.routers > 1:
        cluster = Cluster(groups, _make_fleet(policy, make_router, scenario.seed), signals, on_arrival, outside=outside)
    else:
        router = make_router()
        cluster = Cluster(groups, router, signals, on_arrival, make_queue(policy, signals, router), outside)
    return cluster.run(scenario.workload, scenario.arrivals)


def _make_fleet(policy: PolicySettings, make_router: Callable[[], Router], seed: int) -> RouterFleet:
    if policy.queue_policy != NO_QUEUE:
        raise ConfigError(f"{policy.title}: queue_policy needs one router, and routers is {policy.routers}")
    delay_ms = policy.router_delay_ms
    delay_ns = None if delay_ms is None else round(delay_ms * NS_PER_MS)
    return RouterFleet(make_router, policy.routers, RouterLinks(delay_ns, policy.router_loss), seed)


def make_queue(policy: PolicySettings, signals: SignalSettings, router: Router) -> SimulatedQueue | None:
    """Make the queue in front of a simulated router; None if the combination has none.

    Raises:
        ConfigError: there is no such order policy, or the router gets no figures by which engines are saturated.
    """
    if policy.queue_policy == NO_QUEUE:
        return None
    known = {name for channel in signals.channels for name in channel.figures}
    if lacking := {"num_running", "num_waiting", "kv_usage"} - known:
        names = ", ".join(sorted(lacking))
        raise ConfigError(f"queue_policy needs {names}: give [[signals.channels]] with them in figures")
    rules = SaturationRules(kv_usage=policy.queue_kv_usage, num_waiting=policy.queue_waiting)
    return SimulatedQueue(router, ORDER_POLICIES.make(policy.queue_policy), rules)


def route_inputs(scenario: Scenario, policy: PolicySettings) -> RouteInputs:
    """Return what a simulated router can supply: the figures of its signals, and TTFTs at the engines' prices."""
    signals, prices = policy.signals or scenario.signals, scenario.prices
    idle = [None] * (prices.num_ranks - 1)
    return RouteInputs(
        figures=frozenset(name for channel in signals.channels for name in channel.figures),
        remedy="Give it a channel: [[signals.channels]] with its name in figures.",
        predict_ttft_ns=priced_ttft(
            lambda batch: prices.step_ns([batch, *idle]), scenario.bounds.max_num_batched_tokens
        ),
    )


def _make_ranks(bounds: SchedulerSettings, scenario: Scenario, policy: PolicySettings) -> Ranks:
    if policy.mode == "fused":
        return Group(bounds, scenario.prices)
    cost, gate = stage_cost(scenario.engines, scenario.popularity), None
    if scenario.popularity is not None and (experts := cost.network.experts) is not None:
        popularity = scenario.popularity.by_layer(cost.network.num_layers, experts.num_experts)
        gate = PopularityGate(popularity, experts.top_k, scenario.seed)
    step_policy = policy.make_step_policy()
    return StagedRank(bounds, cost, step_policy, passes_decodes=policy.pass_decodes, gate=gate)


FIRST, LAST = (
    0.1,
    0.9,
)  # shares of the answers between which the rate is taken: before and after it, engines are not full
_FEWEST = 20  # answers, so that at least two lie before and after the part that counts
_START_RATE = 1.0  # of generated sessions, until a first saturation is known


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """The rate that a load was found from.

    Attributes:
        policy: title of the policy under which it was found.
        requests_per_s: most requests a second, when all requests arrive at once.
        load: share of it that is offered.
        rate: offered requests a second.
        was_full: whether requests waited for at least half of the time that the rate was taken from. Otherwise it is
            that of a batch, which ends in a burst, and too high.
    """

    policy: str
    requests_per_s: float
    load: float
    rate: float
    was_full: bool

    def sentence(self, num_requests: int) -> str:
        """Say how the rate was found, and whether to believe it."""
        doubt = "; too high, because most requests are computed at once (max_num_seqs): give more requests"
        return (
            f"saturation: {self.requests_per_s:.4g} requests/s ({self.policy}; all {num_requests:,} requests at once,"
            f" from the end of the first {FIRST:.0%} of the answers to that of {LAST:.0%}); load {self.load:g} is"
            f" {self.rate:.4g} requests/s{'' if self.was_full else doubt}"
        )


def at_load(settings: SimSettings, directory: Path) -> tuple[SimSettings, Saturation]:
    """Replace the load of a simulation by a rate, which a run of its first policy finds.

    Generated sessions are run twice, because how soon conversations return depends on their rate.

    Args:
        settings: settings whose workload has a load.
        directory: directory of relative paths.

    Returns:
        The settings with a rate, and how it was found.
    """
    load = settings.workload.load
    assert load is not None, "the workload has a load"
    found, was_full, rate = 0.0, True, _START_RATE
    for _ in range(2 if settings.workload.sessions is not None else 1):
        found, was_full = saturation_rate(_at_rate(settings, rate), directory)
        rate = load * found
    saturation = Saturation(
        policy=settings.policies[0].title, requests_per_s=found, load=load, rate=rate, was_full=was_full
    )
    return _at_rate(settings, rate), saturation


def saturation_rate(settings: SimSettings, directory: Path) -> tuple[float, bool]:
    """Return the rate at which engines answer under the first policy when all requests arrive at once.

    Beside it stands whether requests waited for at least half of the time that it was taken from.

    Raises:
        ConfigError: there are too few requests to tell.
    """
    scenario = make_scenario(settings, directory)
    at_once = np.arange(len(scenario.workload), dtype=np.int64)  # a nanosecond apart, so that their order is theirs
    results = run(replace(scenario, arrivals=AtTimes(at_once, _order(scenario.arrivals))), settings.policies[0])
    ends = results.last_token_ns[results.is_answered]
    if len(ends) < _FEWEST:
        raise ConfigError(
            f"[workload] load needs {_FEWEST} answers to find a rate, and got {len(ends)}: give more requests"
        )
    _, begin_ns, end_ns = _middle(ends)
    was_full = int(results.admitted_ns[results.is_answered].max()) >= (begin_ns + end_ns) // 2
    return middle_rate(ends), was_full


def middle_rate(end_ns: NDArray[np.int64]) -> float:
    """Return requests a second between the ends of the first and the last tenth.

    Args:
        end_ns: int64[n], ends of answers in ns.

    Raises:
        ConfigError: one step ends them all, so that there is no rate.
    """
    num_answers, first_ns, last_ns = _middle(end_ns)
    if first_ns == last_ns:
        raise ConfigError(
            f"a rate needs answers that end one after the other, and {num_answers + 1} of {len(end_ns)} end in the same"
            " step: give more requests than the engines compute at once (max_num_seqs)"
        )
    return num_answers / ((last_ns - first_ns) / NS_PER_S)


def _middle(end_ns: NDArray[np.int64]) -> tuple[int, int, int]:
    """Return how many answers end from the end of the first tenth to that of the ninth, and these two ends in ns."""
    ends, first, last = np.sort(end_ns), int(FIRST * len(end_ns)), int(LAST * len(end_ns))
    return last - first, int(ends[first]), int(ends[last])


def _at_rate(settings: SimSettings, rate: float) -> SimSettings:
    workload = msgspec.structs.replace(settings.workload, load=None, rate=rate)
    return msgspec.structs.replace(settings, workload=workload)


def _order(arrivals: Arrivals) -> NDArray[np.int64] | None:
    """Return the order of arrival, or None for the order of the rows."""
    if not isinstance(arrivals, Sessions):
        return None
    order: NDArray[np.int64] = np.argsort(arrivals.arrival_ns(Pace()), kind="stable")
    return order
