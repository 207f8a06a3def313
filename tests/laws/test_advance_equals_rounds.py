"""Law: advance(k) has the effect of k rounds of schedule and update, for every k up to the horizon, however split."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Request, SamplingParams
from moestro.core.work import StepResult
from moestro.engine.emitted import Emitted
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings

BLOCK_SIZE = 4


def block_name(*parts) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


class Scripts:
    """What a priced device knows of hashed requests: how long each answer is, and the hashes of what it generates."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.length: dict[str, int] = {}
        self.requests: list[Request] = []

    def request(self, i: int) -> Request:
        num_prompt, stem = int(self.rng.integers(1, 24)), int(self.rng.integers(3))
        max_tokens = int(self.rng.integers(0, 30))
        request_id = f"r{i}"
        self.length[request_id] = int(self.rng.integers(min(1, max_tokens), max_tokens + 1))
        hashes = b"".join(block_name("stem", stem, b) for b in range(num_prompt // BLOCK_SIZE))
        if (
            self.requests and self.rng.random() < 0.5
        ):  # the next turn of a conversation: an earlier prompt and its answer
            earlier = self.requests[self.rng.integers(len(self.requests))]
            num_prompt = min(earlier.num_prompt_tokens + int(self.rng.integers(1, 16)), 26)
            hashes = earlier.block_hashes + self.hashes(earlier, earlier.num_prompt_tokens, num_prompt)
            hashes = hashes[: num_prompt // BLOCK_SIZE * HASH_BYTES]
        self.requests.append(self._request(i, num_prompt, max_tokens, hashes))
        return self.requests[-1]

    def _request(self, i: int, num_prompt: int, max_tokens: int, hashes: bytes) -> Request:
        return Request(
            request_id=f"r{i}",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_ns=i,
            block_hashes=hashes,
            priority=int(self.rng.integers(2)),
        )

    def num_generated(self, scheduler: Scheduler, slot: int) -> int:
        return int(scheduler.table.num_tokens[slot] - scheduler.table.num_prompt[slot])

    def hashes(self, request: Request, start: int, end: int) -> bytes:
        """Of the blocks beyond the prompt's full ones that become full when positions start .. end - 1 are computed."""
        first = max(start // BLOCK_SIZE, request.num_prompt_tokens // BLOCK_SIZE)
        return b"".join(block_name(request.request_id, b) for b in range(first, end // BLOCK_SIZE))

    def rounds_until_one_ends(self, scheduler: Scheduler) -> int:
        running = scheduler.table.running.tolist()
        left = [
            self.length[scheduler.table.at(s).request.request_id] - self.num_generated(scheduler, s) for s in running
        ]
        return min(left)

    def one_round(self, scheduler: Scheduler) -> Emitted:
        plan = scheduler.schedule(0)
        if plan is None:
            return Emitted()
        units, table = plan.units, scheduler.table
        finished = np.zeros(len(units), np.bool_)
        block_hashes = {}
        for i, slot in enumerate(units.slot.tolist()):
            request = table.at(slot).request
            finished[i] = self.num_generated(scheduler, slot) + 1 >= self.length[request.request_id]
            start, end = int(units.start[i]), int(units.start[i] + units.num_tokens[i])
            known = len(table.at(slot).hashes)
            packed = self.hashes(request, max(start, known * BLOCK_SIZE), end)
            if packed:
                block_hashes[i] = packed
        return scheduler.update(StepResult(units.slot, finished=finished, block_hashes=block_hashes), 0)

    def advance(self, scheduler: Scheduler, num_rounds: int) -> Emitted:
        table, packed = scheduler.table, {}
        finished = []
        for slot in table.running.tolist():
            request, start = table.at(slot).request, int(table.num_computed[slot])
            packed[slot] = self.hashes(request, start, start + num_rounds)
            if self.num_generated(scheduler, slot) + num_rounds >= self.length[request.request_id]:
                finished.append(slot)
        return scheduler.advance(num_rounds, packed, finished)


def snapshot(scheduler: Scheduler) -> dict:
    """Everything that a later decision could depend on."""
    table, pool, running = scheduler.table, scheduler.pool, scheduler.table.running
    columns = ("num_tokens", "num_computed", "capacity", "next_full_at", "write_start", "num_in_flight")
    return {
        "running": running.tolist(),
        **{name: getattr(table, name)[running].tolist() for name in columns},
        "tables": [table.block_table[s, : len(table.at(s).blocks)].tolist() for s in running],
        "sequences": [(table.at(s).blocks, table.at(s).hashes) for s in running.tolist()],
        "blank": list(pool._blank),
        "cached": list(pool._cached),
        "ref_count": list(pool._ref_count),
        "hashes": dict(pool._hash_of),
        "waiting": [s.serial for s in scheduler.waiting.in_order(scheduler._order, 0)],
        "num_steps": scheduler.num_steps,
        "counts": scheduler.counts,
    }


def ends(emitted: Emitted) -> list:
    told = zip(emitted.sequences, emitted.finish_reasons, strict=True)
    return [(sequence.serial, reason) for sequence, reason in told if reason is not None]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(14, 40),
    max_num_seqs=st.integers(1, 8),
    order=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
)
def test_advance_equals_rounds(seed, num_blocks, max_num_seqs, order, caching):
    rng = np.random.default_rng(seed)
    bounds = SchedulerSettings(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=56,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        scheduling_policy=order,
        enable_prefix_caching=caching,
    )
    stepwise, jumping = Scheduler(bounds), Scheduler(bounds)
    scripts = Scripts(rng)
    arrivals = sorted((int(rng.integers(0, 60)), i) for i in range(12))
    now = 0
    while arrivals or jumping.has_work:
        while arrivals and arrivals[0][0] <= now:
            request = scripts.request(arrivals.pop(0)[1])
            stepwise.add(request)
            jumping.add(request)
        limit = jumping.horizon(now)
        if limit:
            limit = min(limit, scripts.rounds_until_one_ends(jumping), arrivals[0][0] - now if arrivals else limit)
        if limit > 0:
            num_rounds = int(rng.integers(1, limit + 1))
            ended = ends(scripts.advance(jumping, num_rounds))
        else:
            num_rounds = 1
            ended = ends(scripts.one_round(jumping))
        singly = [end for _ in range(num_rounds) for end in ends(scripts.one_round(stepwise))]
        assert ended == singly
        now += num_rounds
        assert snapshot(jumping) == snapshot(stepwise)
        jumping.check()
    assert jumping.pool.num_free == num_blocks


def test_a_long_decode_is_jumped_over_in_few_pieces():
    scheduler = Scheduler(SchedulerSettings(num_blocks=100, block_size=4, max_model_len=400))
    scheduler.add(Request(request_id="r", num_prompt_tokens=8, sampling=SamplingParams(max_tokens=300), arrival_ns=0))
    scripts = Scripts(np.random.default_rng(0))
    scripts.length["r"] = 300
    assert scheduler.horizon(0) == 0, "the prompt has to be scheduled"
    scripts.one_round(scheduler)
    assert scheduler.horizon(0) == 299, "so many tokens are left, and the last one ends it"


def test_the_horizon_ends_where_blocks_run_out():
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=64))
    scripts = Scripts(np.random.default_rng(0))
    for i in range(2):
        scheduler.add(
            Request(request_id=f"r{i}", num_prompt_tokens=8, sampling=SamplingParams(max_tokens=24), arrival_ns=i)
        )
        scripts.length[f"r{i}"] = 24
    scripts.one_round(scheduler)
    assert scheduler.horizon(0) == 8, "four blocks are left, for 8 more tokens of two sequences"
    scripts.advance(scheduler, 8)
    assert scheduler.horizon(0) == 0
    scripts.one_round(scheduler)
    assert scheduler.counts.num_preemptions == 1


def test_the_horizon_ends_where_a_filled_block_lets_the_next_request_in():
    scheduler = Scheduler(SchedulerSettings(num_blocks=6, block_size=4, max_model_len=24))
    scripts = Scripts(np.random.default_rng(0))
    first = scripts._request(0, 8, 16, b"".join(block_name("stem", 0, b) for b in range(2)))
    scripts.length["r0"] = 16
    scheduler.add(first)
    scripts.one_round(scheduler)
    scripts.one_round(scheduler)  # 9 tokens have KV, in 3 of 6 blocks
    # The next turn needs 5 blocks. It shares 2, but of the other 3 one is kept back: it fits once it shares 3.
    scripts.length["r1"] = 4
    scheduler.add(scripts._request(1, 20, 4, first.block_hashes + scripts.hashes(first, 8, 20)))
    assert scheduler.horizon(0) == 3
    scripts.advance(scheduler, 3)
    assert scheduler.horizon(0) == 0
    scripts.one_round(scheduler)
    assert len(scheduler.waiting) == 0
