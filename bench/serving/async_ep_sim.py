"""The paced systems of `async_ep.py` on virtual time: the same schedulers, router, flow, gate, prices and links.

The host is a parameter: the time that one item took this machine beside its modelled duration, divided by the dilation.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from moestro.cost.model import PopularityForm
from moestro.cost.roofline import VLLM_HOST
from moestro.engine.steps import StepOutput
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import Cluster
from moestro.sim.groups.group_builder import SimGroup, group_kv_blocks, make_group
from moestro.sim.groups.group_setup import make_group_setup
from moestro.sim.groups.worker_group import WorkerGroup
from moestro.sim.results import Results
from moestro.sim.scenario import make_bounds
from moestro.sim.settings import GroupSettings, PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.workload.rows import RequestForm, RequestMaker, equal_rows
from moestro.workload.run_records import spread_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.async_ep_load import Load

_WARM_NS = 10_000_000_000  # the load begins then, long after the end of the warm-up
_LOOK_NS = 20_000_000  # between two looks at the queues


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Time that this machine needs beside the modelled one, µs.

    Attributes:
        attention_us, expert_us: for an item of a worker with attention, of a worker with experts.
        step_us: for a step in `ep` mode.
    """

    attention_us: float = 0.0
    expert_us: float = 0.0
    step_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One paced system under one load.

    Attributes:
        mode: `ep` or `async`.
        num_workers, num_expert_workers: workers of the group, and those of them with experts alone.
        gpu, network, link: names of the modelled device, network and link.
        gate: popularity of the experts.
        policy: step policy of all workers.
        route: routing policy.
        num_seqs, num_batched_tokens: limits of each engine.
        host: this machine's times, not dilated.
        dilation: factor on all modelled durations.
    """

    mode: str
    num_workers: int
    num_expert_workers: int
    gpu: str
    network: str
    link: str
    gate: PopularityForm
    policy: str
    route: str
    num_seqs: int
    num_batched_tokens: int
    host: HostTimes = HostTimes()
    dilation: float = 1.0


class ClosedLoop:
    """Arrivals of a load: the warm-up at 0, then a request whenever one of its turns is free.

    Implements `sim.arrivals.Arrivals`.

    Args:
        load: the load.
        sent_ms: when the client sent each request that waits for no other one, since the first of them. None means that
            all arrive at once, which no client can do: a group in lock-step then takes all of them into its first
            step, instead of the first one alone.
    """

    def __init__(self, load: Load, sent_ms: Sequence[float] | None = None) -> None:
        self._num_warm, self._num_rows = load.num_warm, load.num_warm + load.num_requests
        num_users = min(load.num_users, load.num_requests)
        self._next = load.num_warm + num_users
        self.first_rows = np.arange(self._next)
        sent_ns = np.zeros(num_users) if sent_ms is None else np.array(sent_ms) * 1e6
        begin_ns = _WARM_NS + np.rint(sent_ns).astype(np.int64)
        self.start_ns: np.ndarray = np.append(np.zeros(load.num_warm, np.int64), begin_ns)

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Return the next request that waits for a turn."""
        if row < self._num_warm or self._next == self._num_rows:
            return None
        self._next += 1
        return self._next - 1, ended_ns


class WatchedGroup:
    """A group whose tokens, queues and work are noted from `_WARM_NS` on; implements `sim.groups.group.Ranks`."""

    def __init__(self, group: SimGroup) -> None:
        self.group = group
        self.token_ns: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.busy_ns: np.ndarray | None = None  # at the start of the load
        self._look_at_ns = _WARM_NS
        self.at_ns: list[int] = []
        self.depths: list[np.ndarray] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["group"], name)

    def turn(self, now_ns: int, until_ns: int) -> list[StepOutput]:
        """Implement `Ranks.turn`."""
        if now_ns >= _WARM_NS:
            if self.busy_ns is None:
                self.busy_ns = self.group.busy_ns.copy()
            if now_ns >= self._look_at_ns:
                self._look(now_ns)
        # The group comes back for the next look, even if no request gains a token before.
        outputs = self.group.turn(now_ns, min(until_ns, max(self._look_at_ns, now_ns + 1)))
        for seat, output in enumerate(outputs):
            for sequence in output.sequences:
                self.token_ns[seat, sequence.serial].append(now_ns)
        return outputs

    def _look(self, now_ns: int) -> None:
        self._look_at_ns = now_ns + _LOOK_NS
        if isinstance(self.group, WorkerGroup):
            self.at_ns.append(now_ns)
            self.depths.append(np.array([each.waiting_by_layer(now_ns)[0] for each in self.group.executors]))


def simulate(case: Case, load: Load, sent_ms: Sequence[float] | None = None) -> dict[str, object]:
    """Run a case on virtual time, and return figures in modelled time; `sent_ms` as in `ClosedLoop`."""
    group, policy, bounds = _make_group(case)
    watched = WatchedGroup(group)
    router = Router(policy_from(policy.route), RouterSettings(block_size=bounds.block_size))
    for _ in group.seats:
        router.set_routable(router.add_engine(EngineSpec(num_blocks=bounds.num_blocks)), routable=True)
    rows = equal_rows(load.num_warm + load.num_requests, load.num_own, 1, load.num_shared)
    lengths = np.append(np.full(load.num_warm, 2), load.lengths())
    workload = RequestMaker(replace(rows, num_output_tokens=lengths), RequestForm(block_size=bounds.block_size))
    results = Cluster([watched], router).run(workload, ClosedLoop(load, sent_ms))
    return _figures(case, load, watched, results)


def _make_group(case: Case) -> tuple[SimGroup, PolicySettings, object]:
    engines = SimEngineSettings(
        gpu=case.gpu,
        network=case.network,
        max_num_seqs=case.num_seqs,
        max_num_batched_tokens=case.num_batched_tokens,
        host_attention_us=case.host.attention_us / case.dilation,
        host_expert_us=case.host.expert_us / case.dilation,
        host_step_us=VLLM_HOST.step_ns / 1e3 + case.host.step_us / case.dilation,
        host_sequence_us=VLLM_HOST.sequence_ns / 1e3,
    )
    policy = PolicySettings(
        mode=case.mode,
        num_expert_workers=case.num_expert_workers,
        attention_step_policy=case.policy,
        expert_step_policy=case.policy,
        # A server in async mode has as many places for each class.
        max_num_urgent_seqs=case.num_seqs if case.mode == "async" else 0,
        route=case.route,
    )
    settings = SimSettings(
        workload=WorkloadSettings(prompt_tokens=1, output_tokens=1, num_requests=1, rate=1.0),  # replaced by the load
        engines=engines,
        group=GroupSettings(num_workers=case.num_workers, link_within=case.link),
        popularity=case.gate,
        policies=(policy,),
    )
    setup = make_group_setup(settings)
    bounds = make_bounds(engines, group_kv_blocks(setup, policy))
    bounds = replace(bounds, max_num_urgent_seqs=policy.num_urgent_seqs(case.num_seqs))
    return make_group(setup, policy, bounds, 0), policy, bounds


def _figures(case: Case, load: Load, watched: WatchedGroup, results: Results) -> dict[str, object]:
    rows = slice(load.num_warm, None)
    assert results.is_answered.all(), results.refusals
    duration_ns = int(results.last_token_ns[rows].max() - results.arrival_ns[rows].min())
    gaps = [np.diff(times) for times in watched.token_ns.values() if times[0] >= _WARM_NS]
    busy = watched.group.busy_ns - watched.busy_ns
    num_tokens = int(results.num_tokens[rows].sum())
    ttft = results.first_token_ns[rows] - results.arrival_ns[rows]
    return {
        "tokens_per_s": num_tokens / duration_ns * 1e9,
        "duration_s": duration_ns / 1e9,
        "ttft_ms": msgspec.to_builtins(spread_of(ttft)),
        "itl_ms": msgspec.to_builtins(spread_of(np.concatenate(gaps))),
        "stall_shares": (1 - busy / duration_ns).round(4).tolist(),
        "queues": _queues(case, watched),
    }


def _queues(case: Case, watched: WatchedGroup) -> dict[str, list]:
    """Return the depth of the queues of each layer over time, the mean of the workers of each kind."""
    if not watched.depths:
        return {"at_s": [], "attention": [], "experts": []}
    depths, num_homes = np.array(watched.depths), case.num_workers - case.num_expert_workers
    return {
        "at_s": [round((at_ns - _WARM_NS) / 1e9, 3) for at_ns in watched.at_ns],
        "attention": depths[:, :num_homes].mean(axis=1).round(1).tolist(),
        "experts": depths[:, num_homes:].mean(axis=1).round(1).tolist(),
    }
