"""Gimbal's loads and the findings of their runs: BurstGPT's lengths, ShareGPT-like users, tenants with own experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.cost.model import even_gating
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.repro.gimbal.systems import BLOCK_SIZE, SYSTEMS, EpBed, System
from moestro.repro.results import Cell, Findings
from moestro.repro.testbed import Latency, TimedLoad, latency_ms, signals_of
from moestro.routing.policies.gimbal import GimbalV1
from moestro.routing.policy_contract import RoutePolicy
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Barrier, Group, Ranks
from moestro.sim.groups.live_placement import OfflineRouting, SimPlacement
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.sim.results import Results
from moestro.sim.scenario import middle_rate
from moestro.workload.experts.expert_profile import RoutingTrace, read_routing
from moestro.workload.generated.draws import Shape, draw_shape, poisson
from moestro.workload.generated.sessions import App, LogNormal, SessionShape, steady_rows
from moestro.workload.rows import Int64s, RequestForm, RequestMaker, Rows
from moestro.workload.traces.reading import read_trace

# The findings: one cell for each run, and the figures of a cell.


class GimbalCell(Cell, frozen=True, kw_only=True):
    """One run.

    Attributes:
        setting: what the part varies, such as KV blocks of a rank or the skew of experts; "" where it varies nothing.
        num_requests: requests, all of which are counted, as in the paper.
        requests_per_s: requests that end a second, of the middle 80 % of all ends, because the longest answers of
            BurstGPT have 100 times the mean and end long after the others.
        tokens_per_s: output tokens a second, until the last answer ends.
        step_ms: mean time of a step.
        num_plans, moved_gb, stall_ms: plans of placement, weights that they moved, and the steps' wait for them.
        balance: mean over largest load in the windows before all plans but the first; 0 without such a plan.
        branches: decisions by each branch of Algorithm 1; empty for other routers.
        num_aged: requests that waited longer than 5 s for their admission.
        num_preemptions: times that a request gave up its KV.
        is_generated: whether lengths are generated.
        kept_pairs: share of visits to experts of consecutive layers that stay on one device; 0 in runs that are older
            than the figure.
    """

    setting: str = ""
    num_requests: int
    ttft_ms: Latency
    tpot_ms: Latency
    requests_per_s: float
    tokens_per_s: float
    step_ms: float
    num_plans: int
    moved_gb: float
    stall_ms: float
    balance: float
    branches: dict[str, int]
    num_aged: int
    num_preemptions: int
    is_generated: bool
    kept_pairs: float = 0.0


class PrefixCell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the prefix-hit table.

    Attributes:
        run: number of the run; all have the same requests.
        hit_blocks, queried_blocks: blocks of 16 tokens that were found, and looked up, in the prefix caches.
    """

    load: str
    system: str
    run: int
    num_requests: int
    hit_blocks: int
    queried_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the queried blocks that were found."""
        return self.hit_blocks / self.queried_blocks


class GimbalFindings(Findings[GimbalCell], kw_only=True):
    """All runs.

    Attributes:
        prefixes: runs of the prefix-hit table.
        levels: by part and setting, the factor on steps or the rate that the search found.
        about_lengths: by part, the origin of the lengths.
    """

    prefixes: list[PrefixCell] = msgspec.field(default_factory=list)
    levels: dict[str, float] = msgspec.field(default_factory=dict)
    about_lengths: dict[str, str] = msgspec.field(default_factory=dict)

    def of(self, load: str, rate: float, system: str, setting: str = "") -> list[GimbalCell]:
        """The runs of a system, by seed."""
        wanted = (load, rate, system, setting)
        return [cell for cell in self.cells if (cell.load, cell.rate, cell.system, cell.setting) == wanted]

    def settings(self, load: str) -> list[str]:
        """The values of the setting that a load varies, in the order of the runs."""
        return list(dict.fromkeys(cell.setting for cell in self.cells if cell.load == load))

    def change(self, figure: str, cells: list[GimbalCell], base: list[GimbalCell]) -> float | None:
        """Relative change of the mean of a figure over the seeds that both have; None if they have none.

        Args:
            figure: a name of CELL_FIGURES.
        """
        value = CELL_FIGURES[figure]
        theirs = {cell.seed: value(cell) for cell in base}
        pairs = [(value(cell), theirs[cell.seed]) for cell in cells if cell.seed in theirs]
        if not pairs:
            return None
        ours, others = np.mean(pairs, axis=0)
        return float(ours / others - 1)


def ttft(cell: GimbalCell) -> float:
    """Mean TTFT, ms."""
    return cell.ttft_ms.mean


def ttft_p99(cell: GimbalCell) -> float:
    """P99 TTFT, ms."""
    return cell.ttft_ms.p99


def tpot(cell: GimbalCell) -> float:
    """Mean TPOT, ms."""
    return cell.tpot_ms.mean


def throughput(cell: GimbalCell) -> float:
    """Requests a second."""
    return cell.requests_per_s


CELL_FIGURES = {"TTFT": ttft, "TTFT P99": ttft_p99, "TPOT": tpot, "throughput": throughput}


# In 8,000 requests of BurstGPT (CC-BY-4.0) prompts have a mean of 363 and a median of 217 tokens, and answers a mean of
# 57 and a median of 7. Log-normal draws with these means and medians stand in where no trace is given.
_PROMPT, _ANSWER, _LONGEST_ANSWER = LogNormal(217, 1.01), LogNormal(7, 2.05), 3206
_LONGEST_PROMPT = 14_117
_NUM_GENERATED = 8000

# Figure 11 of the paper counts 16,096 to 20,416 hits, all multiples of 16, at rates of 3.2 to 4.1 %: so they are tokens
# in blocks of 16, and a request has some 50 tokens. Users here send single questions of about 50 tokens. The text that
# 4 % of all requests begin with was fitted to vLLM's hit rate; who shares what decides what affinity gains.
USERS = SessionShape(
    like="ShareGPT's first questions, 10,000 requests of about 50 tokens",
    single_share=1.0,
    mean_turns=1.0,
    apps=(App(0.96, 1), App(0.04, 32)),
    num_users=2_500,  # assumed, as is the exponent
    user_skew=0.6,
    user_tokens=LogNormal(3, 0.8),
    first_tokens=LogNormal(28, 0.9),
    next_tokens=LogNormal(1, 0),
    output_tokens=LogNormal(60, 0.8),
    think_s=LogNormal(1, 0),
    max_model_len=4_096,
)
# Users whose requests begin with a text of their own, as with a template, and with nothing that all share.
OWN_TEXTS = replace(
    USERS, like="questions with a text of each user", apps=(App(1.0, 1),), user_tokens=LogNormal(8, 0.8)
)
# The same users in conversations: ShareGPT's have 3 to 4 turns, and each contains those before it.
CHATS = replace(
    USERS,
    like="ShareGPT's conversations",
    single_share=0.4,
    mean_turns=3.0,
    apps=(App(1.0, 1),),
    user_tokens=None,
    first_tokens=LogNormal(60, 1.2),
    next_tokens=LogNormal(40, 1.2),
    output_tokens=LogNormal(180, 0.8),
    think_s=LogNormal(30, 1.0),
)


@cache
def burstgpt(trace: Path | None) -> Rows:
    """BurstGPT's requests: of a file, or generated with its means and tails."""
    if trace is not None:
        return read_trace(trace)
    rng = np.random.default_rng(0)
    prompt = np.minimum(_PROMPT.draw(rng, _NUM_GENERATED), _LONGEST_PROMPT)
    return Rows(prompt, np.minimum(_ANSWER.draw(rng, _NUM_GENERATED), _LONGEST_ANSWER), is_generated=True)


@cache
def recorded_routing(choices: Path, index: Path) -> RoutingTrace:
    """Recorded choices of a network, read once."""
    return read_routing(choices, index)


def shaped_load(trace: Path | None, shape: Shape, num_requests: int, rate: float, seed: int) -> TimedLoad:
    """Draw requests of a shape, with Poisson arrivals. The paper names no arrival process.

    A seed draws the same requests and the same gaps, scaled, at every rate.
    """
    rows = draw_shape(burstgpt(trace), shape, num_requests, np.random.default_rng([seed, 0]))
    return TimedLoad(shape, rows, poisson(num_requests, rate, np.random.default_rng([seed, 1])), trace is None)


def fitting(rows: Rows, num_tokens: int) -> Rows:
    """Cut answers, and prompts if need be, so that each request fits a KV cache of so many tokens.

    A request may hold no more than three quarters of the cache; few of BurstGPT's are longer. Each client asks for the
    longest answer of all, so the longest prompt fits beside it.
    """
    most = num_tokens * 3 // 4
    prompt = np.minimum(rows.num_prompt_tokens, most - 1)
    output = np.minimum(rows.num_output_tokens, most - prompt)
    return replace(rows, num_prompt_tokens=np.minimum(prompt, num_tokens - output.max()), num_output_tokens=output)


def user_load(shape: SessionShape, num_requests: int, rate: float, jitter_s: float, run: int) -> TimedLoad:
    """Draw requests of users; every run has the same ones, which reach the router with another jitter.

    Args:
        jitter_s: mean delay of a request on its way to the router, exponential; it changes the order.
        run: number of the run, which seeds the jitter alone.
    """
    rows = steady_rows(shape, num_requests, rate, 0)
    assert rows.timestamp_ns is not None, "generated with times"
    late = np.random.default_rng([run, 2]).exponential(jitter_s * 1e9, len(rows)).astype(np.int64)
    arrived = rows.timestamp_ns + late
    order = np.argsort(arrived, kind="stable")
    offsets = arrived[order] - arrived.min()
    return TimedLoad(shape.like, replace(rows.select(order), timestamp_ns=offsets), offsets, is_generated=True)


def with_domains(load: TimedLoad, tenants: Tenants) -> TimedLoad:
    """Give the requests of users the domain of their user; the second half comes from other domains if they drift."""
    user = load.rows.user
    assert user is not None, "requests of users"
    domain = user % tenants.num_domains
    if tenants.drifts:
        half = tenants.num_domains // 2
        domain = user % half + half * (np.arange(len(user)) >= len(user) // 2)
    return replace(load, rows=replace(load.rows, domain=domain))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """Tenants whose requests visit other experts.

    Attributes:
        num_domains: kinds of text, each with a popularity of its own.
        users_per_domain: users of each kind.
        is_shuffled: whether requests of every user come from all domains alike. Then ranks see the same mix.
        drifts: whether the second half of the load comes from other domains than the first.
    """

    num_domains: int = 4
    users_per_domain: int = 2
    is_shuffled: bool = False
    drifts: bool = False


def tenant_load(rows: Rows, tenants: Tenants, rate: float, seed: int) -> TimedLoad:
    """Give requests users and domains, and Poisson arrivals.

    With `drifts`, the first half of the requests comes from the first half of the domains, the other from the rest.
    """
    rng, num = np.random.default_rng([seed, 3]), len(rows)
    domain: Int64s = rng.integers(0, tenants.num_domains, num)
    if tenants.drifts:
        half = tenants.num_domains // 2
        domain = domain % half + half * (np.arange(num) >= num // 2)
    user = domain + tenants.num_domains * rng.integers(0, tenants.users_per_domain, num)
    if tenants.is_shuffled:
        domain = rng.permutation(domain)
    timed = replace(rows, domain=domain, user=user)
    return TimedLoad("tenants", timed, poisson(num, rate, np.random.default_rng([seed, 1])), rows.is_generated)


# One run of a system: requests of a load over ranks in lock-step, and the figures of the run.

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
