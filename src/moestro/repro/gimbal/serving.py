"""One run of a system: requests of a load over ranks in lock-step, and the figures of the run."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.cost.gating import even_gating
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.repro.gimbal.beds import BLOCK_SIZE, EpBed
from moestro.repro.gimbal.findings import GimbalCell, PrefixCell
from moestro.repro.gimbal.systems import SYSTEMS, System
from moestro.repro.testbed import TimedLoad, latency_ms, signals_of
from moestro.routing.policies.gimbal import GimbalV1
from moestro.routing.policy_contract import RoutePolicy
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import Cluster
from moestro.sim.engine import Ranks
from moestro.sim.figures.results import Results
from moestro.sim.groups.group import Group
from moestro.sim.groups.live_placement import SimPlacement
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.groups.offline_routing import OfflineRouting
from moestro.sim.load.arrivals import AtTimes
from moestro.sim.prices import Barrier
from moestro.sim.saturation import middle_rate
from moestro.workload.experts.expert_traces import RoutingTrace
from moestro.workload.requests import RequestForm, RequestMaker
from moestro.workload.rows import Rows

_AGE_NS = 5 * NS_PER_S  # theta_age


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """What names a run in the findings.

    Attributes:
        load: part.
        setting: what the part varies; "" means nothing.
    """

    load: str
    rate: float
    system: str
    seed: int
    setting: str = ""


def serve(bed: EpBed, load: TimedLoad, run: RunName, recording: RoutingTrace | None = None) -> GimbalCell:
    """Serve a load until all requests are answered, and return the figures of all of them, as the paper does."""
    system, gate = SYSTEMS[run.system], bed.gate(run.seed, recording)
    group, placement = bed.build(system, load.rows, gate)
    policy = ROUTE_POLICIES.make(system.route)
    maker = RequestMaker(_known_rows(load.rows, system), RequestForm(block_size=BLOCK_SIZE, names_blocks=bed.has_cache))
    results = _serve(bed, group, policy, system, maker, AtTimes(load.offsets_ns))
    cell = _cell(run, load, results, group, placement, policy)
    kept = share_of_kept_pairs(OfflineRouting.drawn(gate, bed.shape.num_layers, placement.table.num_experts), placement)
    return msgspec.structs.replace(cell, kept_pairs=kept)


def share_of_kept_pairs(routing: OfflineRouting, placement: SimPlacement) -> float:
    """Share of the visits of a token to experts of consecutive layers that stay on one device, in the last placement.

    Of an expert with several copies, the first device counts.
    """
    copies = placement.table.num_copies > 0
    device_of = copies.argmax(axis=0)  # int64[layers, experts]
    device = np.stack([row[chosen] for row, chosen in zip(device_of, routing.choices, strict=True)])
    return float((device[:-1, :, :, None] == device[1:, :, None, :]).mean())


def serve_prefixes(bed: EpBed, load: TimedLoad, run: RunName) -> PrefixCell:
    """Serve a load with prefix caches, and return the hits. `run.seed` is the number of the run.

    Prices are those of expected loads, because no figure depends on the experts; a run of 10,000 requests then takes
    seconds.
    """
    system = SYSTEMS[run.system]
    experts = bed.shape.experts
    assert experts is not None, "the network has experts"
    gating = even_gating(bed.popularity.by_rank(experts.num_experts), experts.top_k, bed.num_ranks)
    cost = Roofline(RooflineSettings(network=bed.shape, gpu=bed.device, num_ep_ranks=bed.num_ranks, gating=gating))
    group = Group(bed.scheduler(load.rows, system.order), Barrier(cost))
    maker = RequestMaker(_known_rows(load.rows, system), RequestForm(block_size=BLOCK_SIZE))
    results = _serve(bed, group, ROUTE_POLICIES.make(system.route), system, maker, AtTimes(load.offsets_ns))
    return PrefixCell(
        load=run.load,
        system=run.system,
        run=run.seed,
        num_requests=len(results),
        hit_blocks=int(results.num_hit_tokens.sum()) // BLOCK_SIZE,
        queried_blocks=int((results.num_prompt_tokens // BLOCK_SIZE).sum()),
    )


def _serve(
    bed: EpBed, group: Ranks, policy: RoutePolicy, system: System, maker: RequestMaker, arrivals: AtTimes
) -> Results:
    router = Router(policy, RouterSettings(block_size=BLOCK_SIZE, seed=0))
    for _ in range(bed.num_ranks):
        router.set_routable(router.add_engine(EngineSpec(num_blocks=bed.kv_blocks)), routable=True)
    signals = signals_of(policy, has_pressure=isinstance(group, LockStepGroup))
    results = Cluster([group], router, signals).run(maker, arrivals)
    assert results.is_answered.all(), f"not all were answered: {results.refusals}"
    return results


def _known_rows(rows: Rows, system: System) -> Rows:
    if system.knows_users or rows.user is None:
        return rows
    return Rows(
        rows.num_prompt_tokens, rows.num_output_tokens, streams=rows.streams, stream=rows.stream, domain=rows.domain
    )


def _cell(
    run: RunName, load: TimedLoad, results: Results, group: LockStepGroup, placement: SimPlacement, policy: RoutePolicy
) -> GimbalCell:
    gaps = results.num_tokens.astype(np.int64) - 1
    spans = results.last_token_ns - results.first_token_ns
    seconds = (int(results.last_token_ns.max()) - int(results.arrival_ns.min())) / NS_PER_S
    plans = [each for each in placement.decisions if each.plan is not None]
    found = [each.balance_found for each in plans[1:] if each.balance_found is not None]
    return GimbalCell(
        load=run.load,
        rate=run.rate,
        system=run.system,
        seed=run.seed,
        setting=run.setting,
        num_requests=len(results),
        ttft_ms=latency_ms(results.first_token_ns - results.arrival_ns),
        tpot_ms=latency_ms(spans[gaps > 0] / gaps[gaps > 0]),
        requests_per_s=middle_rate(results.last_token_ns),
        tokens_per_s=float(results.num_tokens.sum()) / seconds,
        step_ms=group.stepping_ns / group.num_steps / 1e6,
        num_plans=len(plans),
        moved_gb=placement.moved_bytes / 1e9,
        stall_ms=placement.stall_ns / 1e6,
        balance=float(np.mean(found)) if found else 0.0,
        branches=dict(policy.counts) if isinstance(policy, GimbalV1) else {},
        num_aged=int((results.admitted_ns - results.arrival_ns >= _AGE_NS).sum()),
        num_preemptions=int(results.num_preemptions.sum()),
        is_generated=load.is_generated,
    )
