"""Law: a rank that jumps over decode steps on a priced device ends every request at the same nanosecond as one that
takes them one by one, with the same blocks remembered, however often sequences are preempted and aborted on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples

from moestro.core.clock import FOREVER_NS
from moestro.core.hashing import HASH_BYTES, split_hashes
from moestro.core.request import FinishReason, Request, SamplingParams, Script
from moestro.cost.gpus import H20
from moestro.cost.networks import network_named
from moestro.cost.priced_device import PricedDevice
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.decode_horizon import DecodeJumps
from moestro.engine.rank import FusedExecutor
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput

BLOCK_SIZE = 4
COST = Roofline(RooflineSettings(network=network_named("gpt-oss-20b"), gpu=H20))


@dataclass
class Job:
    request: Request
    script: Script
    arrival_ns: int
    abort_ns: int | None

    def num_generated(self) -> int:
        return min(self.request.sampling.max_tokens, self.script.num_output_tokens)

    def hashes(self, num_computed: int) -> list[bytes]:
        """The oracle: hashes of the first full blocks, as far as prompt and script know them."""
        of_prompt = split_hashes(self.request.block_hashes)
        of_answer = split_hashes(self.script.block_hashes)
        return (of_prompt + of_answer)[: max(num_computed // BLOCK_SIZE, len(of_prompt))]


def hashes(name: str, first: int, end: int) -> bytes:
    return b"".join(blake2b(f"{name} {i}".encode(), digest_size=HASH_BYTES).digest() for i in range(first, end))


def draw_jobs(rng: np.random.Generator, num_jobs: int) -> list[Job]:
    jobs = []
    for i, arrival_ns in enumerate(np.sort(rng.integers(0, 120_000_000, num_jobs)).tolist()):
        num_prompt, stem = int(rng.integers(1, 24)), f"stem {rng.integers(3)}"
        num_output, max_tokens = int(rng.integers(1, 33)), int(rng.integers(0, 33))
        num_full = num_prompt // BLOCK_SIZE
        known = int(rng.integers(num_full, (num_prompt + num_output) // BLOCK_SIZE + 1))
        request = Request(
            request_id=f"r{i}",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_ns=arrival_ns,
            block_hashes=hashes(stem, 0, num_full),
            priority=int(rng.integers(2)),
        )
        abort_ns = arrival_ns + int(rng.integers(100_000_000)) if rng.random() < 0.2 else None
        answer = stem if rng.random() < 0.5 else request.request_id  # another request may ask for the same blocks
        jobs.append(Job(request, Script(num_output, hashes(answer, num_full, known)), arrival_ns, abort_ns))
    return jobs


class World:
    """One rank on virtual time, stepwise or jumping; the smallest that can be."""

    def __init__(self, jobs: list[Job], bounds: SchedulerSettings, rng: np.random.Generator | None) -> None:
        self.jobs, self.rng = jobs, rng  # without rng: stepwise
        self.scheduler = Scheduler(bounds)
        self.device = PricedDevice(COST, BLOCK_SIZE)
        self.executor = FusedExecutor(self.device)
        self.serial: dict[str, int] = {}
        self.record: list[tuple] = []
        self.num_jumped = 0

    def run(self) -> None:
        events = [(job.arrival_ns, 0, i) for i, job in enumerate(self.jobs)]
        events += [(job.abort_ns, 1, i) for i, job in enumerate(self.jobs) if job.abort_ns is not None]
        self.now_ns = 0
        for at_ns, kind, i in sorted(events):
            self.run_until(at_ns)
            (self.arrive if kind == 0 else self.abort)(self.jobs[i].request)
        self.run_until(None)

    def arrive(self, request: Request) -> None:
        script = self.jobs[int(request.request_id[1:])].script
        serial = self.scheduler.add(request, script.num_output_tokens)
        self.serial[request.request_id] = serial
        self.device.expect(serial, script, request.num_prompt_tokens)

    def abort(self, request: Request) -> None:
        if self.scheduler.abort(request.request_id, self.now_ns):
            self.device.forget(self.serial[request.request_id])
            self.record.append((request.request_id, "abort"))

    def run_until(self, end_ns: int | None) -> None:
        """Steps that begin before `end_ns`, and what has become of earlier ones by then."""
        while True:
            ready_ns = self.executor.ready_at_ns()
            if ready_ns != FOREVER_NS:
                if end_ns is not None and ready_ns > end_ns:
                    self.now_ns = end_ns
                    return
                self.now_ns = max(self.now_ns, ready_ns)
                self.take()
            if end_ns is not None and self.now_ns >= end_ns:
                return
            if self.rng is not None and self.jump(end_ns):
                continue
            plan = self.scheduler.schedule(self.now_ns)
            if plan is None:
                assert end_ns is not None or not self.scheduler.has_work
                self.now_ns = self.now_ns if end_ns is None else end_ns
                return
            self.executor.submit(plan, self.now_ns)

    def take(self) -> None:
        self.note(self.scheduler.update(self.executor.poll(self.now_ns), self.now_ns))

    def note(self, output: StepOutput) -> None:
        for sequence, reason in zip(output.ended, output.finish_reasons.values(), strict=True):
            self.device.forget(sequence.serial)
            num_tokens = len(sequence.generated) if sequence.request.sampling.max_tokens else 0
            self.record.append((sequence.request.request_id, reason, num_tokens, self.now_ns))
        self.check()

    def jump(self, end_ns: int | None) -> bool:
        """Take whole steps that end before the next event and decide nothing. Returns whether there were any."""
        table = self.scheduler.table
        slots, computed = table.running, table.num_computed[table.running]
        limit = DecodeJumps(self.scheduler).horizon(self.now_ns).num_steps
        if limit == 0:
            return False
        limit = int(self.rng.integers(1, limit + 1))
        ends_ns = self.now_ns + np.cumsum(self.device.decode_steps_ns(computed, limit))
        num_steps = limit if end_ns is None else int(np.searchsorted(ends_ns, end_ns))
        if num_steps:
            filled = self.device.filled_blocks(slots, computed, num_steps)
            self.now_ns = int(ends_ns[num_steps - 1])
            self.num_jumped += num_steps
            self.note(DecodeJumps(self.scheduler).advance(num_steps, filled))
        return num_steps > 0

    def check(self) -> None:
        for slot in self.scheduler.table.running.tolist():
            sequence = self.scheduler.table.at(slot)
            job = self.jobs[int(sequence.request.request_id[1:])]
            oracle = job.hashes(int(self.scheduler.table.num_computed[slot]))
            assert sequence.hashes[: len(oracle)] == oracle
            assert len(sequence.hashes) >= len(oracle)  # more, where a preempted sequence is being recomputed


def outcome(world: World) -> dict:
    pool = world.scheduler.pool
    return {
        "record": world.record,
        "num_steps": world.scheduler.num_steps,
        "counts": world.scheduler.counts,
        "hashes": list(pool._hash_of),
        "cached": pool.cached(),
    }


@settings(max_examples=num_examples(60, thorough=150))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(14, 40),
    max_num_seqs=st.integers(1, 20),
    order=st.sampled_from(["fcfs", "priority"]),
)
def test_priced_jumps_equal_steps(seed, num_blocks, max_num_seqs, order):
    rng = np.random.default_rng(seed)
    jobs = draw_jobs(rng, 14)
    bounds = SchedulerSettings(
        num_blocks=num_blocks,
        num_host_blocks=seed % 3 * 8,
        block_size=BLOCK_SIZE,
        max_model_len=56,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=24,
        scheduling_policy=order,
    )
    stepwise, jumping = World(jobs, bounds, None), World(jobs, bounds, rng)
    stepwise.run()
    jumping.run()
    assert outcome(jumping) == outcome(stepwise)
    assert not jumping.device._progress, "every script is dropped"
    ended = {row[0]: row for row in jumping.record}
    assert len(ended) == len(jobs), "every request ends once"
    for job in jobs:
        row = ended[job.request.request_id]
        if row[1] != "abort":
            assert row[2] == job.num_generated()
            assert row[1] == FinishReason.LENGTH


def test_a_long_answer_is_jumped_over_in_one_piece():
    request = Request(
        request_id="r0",
        num_prompt_tokens=6,
        sampling=SamplingParams(max_tokens=900),
        arrival_ns=0,
        block_hashes=hashes("prompt", 0, 1),
    )
    jobs = [Job(request, Script(700, hashes("answer", 1, 150)), 0, None)]
    bounds = SchedulerSettings(num_blocks=300, block_size=BLOCK_SIZE, max_model_len=1000)

    class Longest:
        def integers(self, low, high):
            return high - 1

    world = World(jobs, bounds, Longest())
    world.run()
    assert world.record[0][1:3] == (FinishReason.LENGTH, 700)
    assert world.num_jumped == 699, "of 700 steps only the prompt's is launched"
