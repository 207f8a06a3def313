"""One trace through a rank's own loop, as `serve` runs it, and through the simulator: equal decisions, line by line."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from support.routers import router

from moestro.core.request import FinishReason
from moestro.cost.gpus import H20
from moestro.cost.networks import network_named
from moestro.cost.priced_device import PricedDevice
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.rank import FusedExecutor, Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.results import ANSWERED, REFUSED
from moestro.wire.messages import Add, Outputs, Refused, Shutdown
from moestro.worker.rank_loop import run_rank
from moestro.workload.rows import RequestForm, RequestMaker, Rows, Streams

BLOCK_SIZE = 4
COST = Roofline(RooflineSettings(network=network_named("gpt-oss-20b"), gpu=H20))
POLICIES = [
    {},
    {"scheduling_policy": "sjf:theta_age_s=0.05"},
    {"scheduling_policy": "qllm", "batch_policy": "qllm", "evict_policy": "least_computed_be_first"},
    {"enable_prefix_caching": False, "batch_policy": "prefill_first"},
]


class Diary:
    """An executor that writes down each plan, and who runs and waits at that moment: admissions and evictions show."""

    def __init__(self, executor, scheduler: Scheduler) -> None:
        self.executor, self.scheduler = executor, scheduler
        self.lines: list[str] = []

    def submit(self, plan, now_ns):
        units, scheduler = plan.units, self.scheduler
        blocks = [scheduler.table.at(slot).blocks for slot in units.slot.tolist()]
        running = [scheduler.table.at(slot).serial for slot in scheduler.table.running.tolist()]
        waiting = sorted(s.serial for s in scheduler.by_id.values() if s.slot is None)
        self.lines.append(
            f"{now_ns} step {plan.step}: serials {units.serial.tolist()} starts {units.start.tolist()}"
            f" tokens {units.num_tokens.tolist()} logits {units.logits.tolist()} blocks {blocks}"
            f" running {running} waiting {waiting} free {scheduler.pool.num_free} counts {scheduler.counts}"
        )
        self.executor.submit(plan, now_ns)

    def __getattr__(self, name):
        return getattr(self.executor, name)


class ScriptedRank:
    """The production rank on a priced device that gets each request's future."""

    def __init__(self, bounds: SchedulerSettings, scripts) -> None:
        self.device, self.scripts = PricedDevice(COST, BLOCK_SIZE), scripts
        scheduler = Scheduler(bounds)
        self.diary = Diary(FusedExecutor(self.device), scheduler)
        self.rank = Rank(scheduler, self.diary)

    def __getattr__(self, name):
        return getattr(self.rank, name)

    def add(self, request, now_ns):
        script = self.scripts[request.request_id]
        serial = self.rank.add(request, now_ns, script.num_output_tokens)
        self.device.expect(serial, script, request.num_prompt_tokens)
        return serial


class IdealChannel:
    """Delivers each request at its time, and wakes the loop the moment that the device is ready; it owns the clock."""

    def __init__(self, requests) -> None:
        self.inbox = deque(requests)
        self.now_ns = 0
        self.sent = []
        self.num_steps = 0
        self.device = None

    def clock(self) -> int:
        return self.now_ns

    def has_messages(self) -> bool:
        return bool(self.inbox) and self.inbox[0].arrival_ns <= self.now_ns

    def receive(self, wait_s):
        due = self._due()
        if not due and wait_s != 0:
            ready_ns = self.device.ready_at_ns()
            times = ([self.inbox[0].arrival_ns] if self.inbox else []) + ([] if ready_ns is None else [ready_ns])
            if wait_s is None and not self.inbox:
                return [Shutdown()]
            self.now_ns = max(self.now_ns, min(times))
            due = self._due()
        return due

    def _due(self):
        due = []
        while self.inbox and self.inbox[0].arrival_ns <= self.now_ns:
            due.append(Add(self.inbox.popleft()))
        return due

    def send(self, message):
        self.sent.append((self.now_ns, message))


def draw(seed: int) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = Rows(
        num_prompt_tokens=rng.integers(1, 60, 80),
        num_output_tokens=rng.integers(1, 40, 80),
        streams=Streams(np.full(5, -1), np.zeros(5, np.int64)),
        stream=rng.integers(0, 5, 80),
        is_ls=rng.random(80) < 0.5,
    )
    return rows, np.sort(rng.integers(0, 600_000_000, len(rows)))


def through_the_loop(maker: RequestMaker, offsets, bounds: SchedulerSettings):
    pairs = [maker.make(row, int(at_ns)) for row, at_ns in enumerate(offsets)]
    rank = ScriptedRank(bounds, {request.request_id: script for request, script in pairs})
    channel = IdealChannel([request for request, _ in pairs])
    channel.device = rank.device
    run_rank(rank, channel, channel.clock)
    return rank.diary.lines, channel.sent


def through_the_simulator(maker: RequestMaker, offsets, bounds: SchedulerSettings, *, jump: bool):
    group = Group(bounds, OneRank(COST), jump=jump)
    rank = group.seats[0].rank
    rank.executor = Diary(rank.executor, rank.scheduler)
    results = Cluster([group], router(1, "round_robin")).run(maker, AtTimes(offsets))
    return rank.executor.lines, results


@pytest.mark.parametrize("policies", POLICIES, ids=lambda p: p.get("scheduling_policy", p.get("batch_policy", "fcfs")))
@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_decides_what_the_rank_loop_decides(seed, policies):
    rows, offsets = draw(seed)
    bounds = SchedulerSettings(
        num_blocks=48,
        block_size=BLOCK_SIZE,
        max_model_len=110,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_num_queued_reqs=20,
        **policies,
    )
    maker = RequestMaker(rows, RequestForm(block_size=BLOCK_SIZE))
    loop_lines, sent = through_the_loop(maker, offsets, bounds)
    sim_lines, results = through_the_simulator(maker, offsets, bounds, jump=False)
    assert len(loop_lines) > 200
    assert sim_lines == loop_lines
    assert times_of(sent) == [
        (results.first_token_ns[i], results.last_token_ns[i], results.num_tokens[i])
        for i in np.flatnonzero(results.status == ANSWERED).tolist()
    ]
    assert sum(isinstance(message, Refused) for _, message in sent) == (results.status == REFUSED).sum()
    jumped_lines, jumped = through_the_simulator(maker, offsets, bounds, jump=True)
    assert jumped.digest() == results.digest()
    assert len(jumped_lines) < len(sim_lines), "some were jumped over"


def times_of(sent) -> list[tuple[int, int, int]]:
    """(first token, last token, tokens) of each answered request, by row, from what the rank sent."""
    seen: dict[str, list[int]] = {}
    ended = set()
    for now_ns, message in sent:
        for output in message.outputs if isinstance(message, Outputs) else ():
            seen.setdefault(output.request_id, []).append(now_ns)
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                ended.add(output.request_id)
    rows = sorted((int(name.removeprefix("row-")), times) for name, times in seen.items() if name in ended)
    return [(times[0], times[-1], len(times)) for _, times in rows]
