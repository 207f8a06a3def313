"""Builds a simulation from its settings: the workload, the engines, the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moestro.core.setting_checks import fields_of
from moestro.cost.capacity import kv_blocks
from moestro.cost.gpus import GIB, gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.roofline import VLLM_HOST, HostCost, Roofline, RooflineSettings
from moestro.cost.staged_engines import QLLM, StagedEngine
from moestro.cost.tables import MeasuredCost, load_table
from moestro.engine.settings import SchedulerLimits, SchedulerPolicies, SchedulerSettings
from moestro.errors import ConfigError
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.arrivals import Arrivals
from moestro.sim.cluster import Cluster, Workload
from moestro.sim.engine import Ranks
from moestro.sim.group import Group
from moestro.sim.prices import Barrier, OneRank, Prices
from moestro.sim.results import Results
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings
from moestro.sim.signals import AT_ONCE, SignalSettings
from moestro.sim.staged import StagedRank
from moestro.sim.workload_builder import describe, make_workload
from moestro.workload.requests import RequestForm, RequestMaker

OnArrival = Callable[[], None] | None


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """A workload and its engines, ready to run under any policies.

    Attributes:
        workload: requests.
        arrivals: their arrival times.
        engines: settings of the engines.
        bounds: scheduler settings of each rank, except its policies.
        prices: durations of a group's steps.
        source: short description of the workload, for titles.
        is_generated: whether a generator made the requests; otherwise they were recorded. Results say so.
        signals: signals that reach the router, unless a policy sets its own.
        seed: random seed of the router.
    """

    workload: Workload
    arrivals: Arrivals
    engines: SimEngineSettings
    bounds: SchedulerSettings
    prices: Prices
    source: str
    is_generated: bool
    signals: SignalSettings = AT_ONCE
    seed: int = 0


def make_scenario(settings: SimSettings, directory: Path) -> Scenario:
    """Build the scenario that `settings` describe.

    Args:
        settings: settings of the simulation.
        directory: directory of relative paths.

    Raises:
        ConfigError: a name is unknown, a file cannot be read, or a request exceeds the limit of an engine.
    """
    rows, arrivals = make_workload(settings.workload, directory, settings.seed)
    form = RequestForm(
        block_size=settings.engines.block_size,
        max_tokens=settings.workload.max_tokens,
        names_blocks=settings.engines.enable_prefix_caching,
    )
    workload, bounds = RequestMaker(rows, form), make_bounds(settings.engines)
    _check_fit(workload, bounds.max_model_len)
    return Scenario(
        workload=workload,
        arrivals=arrivals,
        engines=settings.engines,
        bounds=bounds,
        prices=make_prices(settings.engines, directory),
        source=describe(settings.workload),
        is_generated=rows.is_generated,
        signals=settings.signals,
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


def make_prices(engines: SimEngineSettings, directory: Path = Path()) -> Prices:
    """Choose the prices of the engines' steps: a table, a staged engine, or a roofline."""
    if engines.table is not None:
        return OneRank(MeasuredCost(load_table(directory / engines.table)))
    if engines.engine is not None:
        return OneRank(_staged_engine(engines))
    roofline = _roofline(engines)
    return OneRank(roofline) if engines.ep_ranks == 1 else Barrier(roofline)


def _staged_engine(engines: SimEngineSettings) -> StagedEngine:
    network = network_named(engines.network)
    if network.experts is None:
        raise ConfigError(f"[engines] engine = 'qllm' runs networks with experts, and {network.name} has none")
    return StagedEngine(QLLM, network)


def _roofline(engines: SimEngineSettings) -> Roofline:
    host = HostCost(
        step_ns=VLLM_HOST.step_ns if engines.host_step_us is None else engines.host_step_us * 1e3,
        sequence_ns=VLLM_HOST.sequence_ns if engines.host_sequence_us is None else engines.host_sequence_us * 1e3,
    )
    return Roofline(
        RooflineSettings(
            network=network_named(engines.network),
            gpu=gpu_named(engines.gpu),
            host=host,
            num_ep_ranks=engines.ep_ranks,
        )
    )


def make_bounds(engines: SimEngineSettings) -> SchedulerSettings:
    """Return the scheduler settings of each rank, except its policies."""
    num_blocks = engines.num_blocks or kv_blocks(
        network_named(engines.network),
        gpu_named(engines.gpu),
        engines.block_size,
        gpu_memory_utilization=engines.gpu_memory_utilization,
        num_ep_ranks=engines.ep_ranks,
    )
    block_bytes = network_named(engines.network).kv_bytes_per_token * engines.block_size
    return SchedulerSettings(
        num_blocks=num_blocks,
        num_host_blocks=int(engines.kv_offloading_size * GIB) // block_bytes,
        block_size=engines.block_size,
        max_model_len=engines.max_model_len or num_blocks * engines.block_size,
        **fields_of(engines, SchedulerLimits),
    )


def run(scenario: Scenario, policy: PolicySettings, on_arrival: OnArrival = None) -> Results:
    """Run the scenario under one combination of policies.

    Raises:
        ConfigError: the policy does not exist, or one of its settings is out of range.
    """
    policy.check_prices(scenario.engines)
    bounds = replace(
        scenario.bounds,
        max_num_urgent_seqs=policy.num_urgent_seqs(scenario.bounds.max_num_seqs),
        **fields_of(policy, SchedulerPolicies),
    )
    groups = [_make_ranks(bounds, scenario.prices, policy, scenario.engines) for _ in range(scenario.engines.count)]
    router = Router(
        policy_from(policy.route),
        RouterSettings(block_size=bounds.block_size, seed=scenario.seed),
    )
    for _ in range(scenario.engines.count * scenario.prices.num_ranks):
        router.set_routable(router.add_engine(EngineSpec(num_blocks=bounds.num_blocks)), routable=True)
    cluster = Cluster(groups, router, policy.signals or scenario.signals, on_arrival)
    return cluster.run(scenario.workload, scenario.arrivals)


def _make_ranks(bounds: SchedulerSettings, prices: Prices, policy: PolicySettings, engines: SimEngineSettings) -> Ranks:
    ranks: Ranks
    if policy.mode == "fused":
        ranks = Group(bounds, prices)
    else:
        cost = _roofline(engines) if engines.engine is None else _staged_engine(engines)
        ranks = StagedRank(bounds, cost, policy.make_step_policy(), passes_decodes=policy.pass_decodes)
    for seat in ranks.seats:
        seat.has_prompt_kv = engines.dummy_kv
    return ranks
