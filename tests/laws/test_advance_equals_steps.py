"""Law: advance(k) has the effect of k steps of schedule and update, for every k up to the horizon, however split.

Steps take time, and with some policies time alone changes what is decided: the horizon says until when.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.policy_text import policy_text

from moestro.core.clock import FOREVER_NS
from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Request, SamplingParams, ServiceClass
from moestro.core.work import StepResult
from moestro.engine.decode_horizon import DecodeJumps, Horizon
from moestro.engine.registry import BATCH_POLICIES, ORDER_POLICIES
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput


def block_name(*parts) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


class Scripts:
    """What a priced device knows of hashed requests: how long each answer is, and the hashes of what it generates."""

    def __init__(self, rng: np.random.Generator, block_size: int = 4) -> None:
        self.rng, self.block_size = rng, block_size
        self.length: dict[str, int] = {}
        self.requests: list[Request] = []

    def request(self, i: int, now_ns: int) -> Request:
        # Short and long ones: where a long one does not fit, a short one may once it comes first.
        num_prompt = int(self.rng.integers(1, 5 if self.rng.random() < 0.5 else 27))
        stem = int(self.rng.integers(3))
        max_tokens = int(self.rng.integers(0, 30))
        request_id = f"r{i}"
        self.length[request_id] = int(self.rng.integers(min(1, max_tokens), max_tokens + 1))
        hashes = b"".join(block_name("stem", stem, b) for b in range(num_prompt // self.block_size))
        if (
            self.requests and self.rng.random() < 0.5
        ):  # the next turn of a conversation: an earlier prompt and its answer
            earlier = self.requests[self.rng.integers(len(self.requests))]
            num_prompt = min(earlier.num_prompt_tokens + int(self.rng.integers(1, 16)), 26)
            hashes = earlier.block_hashes + self.hashes(earlier, earlier.num_prompt_tokens, num_prompt)
            hashes = hashes[: num_prompt // self.block_size * HASH_BYTES]
        self.requests.append(self._request(i, num_prompt, max_tokens, hashes, now_ns))
        return self.requests[-1]

    def _request(self, i: int, num_prompt: int, max_tokens: int, hashes: bytes, now_ns: int = 0) -> Request:
        return Request(
            request_id=f"r{i}",
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_ns=now_ns,
            block_hashes=hashes,
            priority=int(self.rng.integers(2)),
            service_class=ServiceClass(self.rng.choice(["ls", "be"])),
            user=str(self.rng.integers(3)),
        )

    def hashes(self, request: Request, start: int, end: int) -> bytes:
        """Of the blocks beyond the prompt's full ones that become full when positions start .. end - 1 are computed."""
        first = max(start // self.block_size, request.num_prompt_tokens // self.block_size)
        return b"".join(block_name(request.request_id, b) for b in range(first, end // self.block_size))

    def one_step(self, scheduler: Scheduler, now_ns: int = 0) -> StepOutput:
        plan = scheduler.schedule(now_ns)
        if plan is None:
            return StepOutput()
        units, table = plan.units, scheduler.table
        block_hashes = {}
        for i, slot in enumerate(units.slot.tolist()):
            request = table.at(slot).request
            start, end = int(units.start[i]), int(units.start[i] + units.num_tokens[i])
            known = len(table.at(slot).hashes)
            packed = self.hashes(request, max(start, known * self.block_size), end)
            if packed:
                block_hashes[i] = packed
        return scheduler.update(StepResult(units.slot, block_hashes=block_hashes), now_ns)

    def advance(self, scheduler: Scheduler, num_steps: int) -> StepOutput:
        table, packed = scheduler.table, {}
        for slot in table.running.tolist():
            request, start = table.at(slot).request, int(table.num_computed[slot])
            packed[slot] = self.hashes(request, start, start + num_steps)
        return DecodeJumps(scheduler).advance(num_steps, packed)


def snapshot(scheduler: Scheduler, now_ns: int) -> dict:
    """Everything that a later decision could depend on."""
    table, pool, running = scheduler.table, scheduler.pool, scheduler.table.running
    columns = ("num_tokens", "num_computed", "capacity", "next_full_at", "write_start", "num_in_flight")
    return {
        "running": running.tolist(),
        **{name: getattr(table, name)[running].tolist() for name in columns},
        "tables": [table.at(s).blocks for s in running],
        "sequences": [(table.at(s).blocks, table.at(s).hashes) for s in running.tolist()],
        "blank": list(pool._blank),
        "cached": pool.cached(),
        "ref_count": list(pool._ref_count),
        "hashes": list(pool._hash_of),
        "waiting": [s.serial for s in scheduler.waiting.in_order(now_ns)],
        "num_steps": scheduler.num_steps,
        "counts": scheduler.counts,
    }


def ends(output: StepOutput) -> list:
    return [(output.sequences[row].serial, reason) for row, reason in output.finish_reasons.items()]


# Policies that go together, with ages of a few steps.
AGED = {"theta_age_s": 300e-9}
COMBINATIONS = [
    *[
        (order, AGED if order in ("sjf", "prefill_aware", "qllm") else {}, "decode_first", "last_in_order")
        for order in ORDER_POLICIES.names()
    ],
    *[("fcfs", {}, batch, "last_in_order") for batch in BATCH_POLICIES.names()],
    ("sjf", AGED, "prefill_first", "last_in_order"),
    ("prefill_aware", AGED, "qllm", "last_in_order"),
    *[("qllm", AGED, batch, "least_computed_be_first") for batch in BATCH_POLICIES.names()],
    ("qllm", {}, "qllm", "least_computed_be_first"),
]


def bounds(combination, **more) -> SchedulerSettings:
    order, order_settings, batch, evict = combination
    return SchedulerSettings(
        max_num_batched_tokens=16,
        scheduling_policy=policy_text(order, order_settings),
        batch_policy=policy_text(batch, {"max_batch": 3} if batch.startswith("qllm") else {}),
        evict_policy=evict,
        **{"max_model_len": 56, "block_size": 4, **more},
    )


def run_twins(rng, limits: SchedulerSettings) -> int:
    """The same random history step by step and in jumps. Returns the steps that were jumped over."""
    stepwise, jumping = Scheduler(limits), Scheduler(limits)
    jumps = DecodeJumps(jumping)
    scripts = Scripts(rng, limits.block_size)
    arrivals = sorted((int(rng.integers(0, 1200)), i) for i in range(14))
    durations_ns = rng.integers(1, 60, 5000)
    now_ns, done, jumped = 0, 0, 0
    while arrivals or jumping.has_work:
        while arrivals and arrivals[0][0] <= now_ns:
            request = scripts.request(arrivals.pop(0)[1], now_ns)
            stepwise.add(request, scripts.length[request.request_id])
            jumping.add(request, scripts.length[request.request_id])
        begins_ns = now_ns + np.concatenate([[0], np.cumsum(durations_ns[done : done + 99])])
        horizon = jumps.horizon(now_ns)
        limit, until_ns = horizon.num_steps, horizon.until_ns
        if limit:
            until_ns = min(until_ns, arrivals[0][0]) if arrivals else until_ns
            limit = min(limit, np.count_nonzero(begins_ns[:99] < until_ns))
        num_steps = int(rng.choice([limit, rng.integers(1, limit + 1)])) if limit > 0 else 1
        if limit > 0:
            ended = ends(scripts.advance(jumping, num_steps))
            jumped += num_steps
        else:
            ended = ends(scripts.one_step(jumping, now_ns))
        begins = begins_ns[:num_steps].tolist()
        assert ended == [end for begin_ns in begins for end in ends(scripts.one_step(stepwise, begin_ns))]
        done += num_steps
        now_ns = int(begins_ns[num_steps])
        assert snapshot(jumping, now_ns) == snapshot(stepwise, now_ns)
        jumping.check()
    assert jumping.pool.num_free == limits.num_blocks
    return jumped


@settings(max_examples=num_examples(50, thorough=120))
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([4, 8]),
    num_spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 8),
    combination=st.sampled_from(COMBINATIONS),
    caching=st.booleans(),
)
def test_advance_equals_steps(seed, block_size, num_spare_blocks, max_num_seqs, combination, caching):
    more = {
        "block_size": block_size,
        "num_blocks": 56 // block_size + num_spare_blocks,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": caching,
    }
    run_twins(np.random.default_rng(seed), bounds(combination, **more))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join([c[0], c[2], c[3]]))
def test_every_combination_of_policies_is_jumped_over(combination):
    jumped = [
        run_twins(np.random.default_rng(seed), bounds(combination, num_blocks=20, max_num_seqs=5)) for seed in range(3)
    ]
    assert min(jumped) > 0


def start(combination, **more) -> tuple[Scheduler, Scripts]:
    return Scheduler(bounds(combination, **more)), Scripts(np.random.default_rng(0))


def add(scheduler, scripts, num_prompt, max_tokens, now_ns=0, hashes=b"", service_class="ls") -> int:
    i = len(scripts.length)
    scripts.length[f"r{i}"] = max_tokens
    request = scripts._request(i, num_prompt, max_tokens, hashes, now_ns)
    return scheduler.add(msgspec.structs.replace(request, service_class=ServiceClass(service_class)))


def in_order(scheduler, now_ns):
    return [sequence.serial for sequence in scheduler.waiting.in_order(now_ns)]


def test_the_horizon_ends_when_a_request_ages_that_fits():
    scheduler, scripts = start(
        ("qllm", AGED, "decode_first", "last_in_order"), num_blocks=10, max_model_len=40, max_num_seqs=4
    )
    add(scheduler, scripts, 16, 20)
    scripts.one_step(scheduler, 0)
    small, large = add(scheduler, scripts, 6, 4, 2, service_class="be"), add(scheduler, scripts, 24, 4, 3)
    scripts.one_step(scheduler, 4)  # 5 blocks are taken and one is kept back: 2 would fit, and 6 do not
    assert in_order(scheduler, 4) == [large, small]
    assert DecodeJumps(scheduler).horizon(4) == Horizon(3, 302)
    scripts.advance(scheduler, 1)
    assert DecodeJumps(scheduler).horizon(301) == Horizon(2, 302)
    assert DecodeJumps(scheduler).horizon(302).num_steps == 0, "best effort has aged, is first, and could enter"
    scripts.one_step(scheduler, 302)
    assert in_order(scheduler, 302) == [large]


def test_the_horizon_ends_when_a_running_request_is_promoted():
    scheduler, scripts = start(("qllm", AGED, "decode_first", "last_in_order"), num_blocks=14, max_num_seqs=4)
    add(scheduler, scripts, 4, 9, 7, service_class="be")
    scripts.one_step(scheduler, 7)
    assert DecodeJumps(scheduler).horizon(8).until_ns == 307, "a batch policy may treat it differently from then on"
    assert DecodeJumps(scheduler).horizon(307).until_ns == FOREVER_NS


def test_the_horizon_ends_where_a_taken_block_was_anothers_prefix():
    aware = ("prefill_aware", AGED, "decode_first", "last_in_order")
    scheduler, scripts = start(aware, num_blocks=5, max_model_len=20, max_num_seqs=4)
    prefix = b"".join(block_name("stem", 0, b) for b in range(3))
    add(scheduler, scripts, 12, 4, 0, prefix)
    scripts.one_step(scheduler)
    scheduler.abort("r0", 0)  # it leaves three blocks behind, cached
    add(scheduler, scripts, 8, 12)
    scripts.one_step(scheduler)  # this one runs in the other two, and fills them
    cached, short = add(scheduler, scripts, 15, 4, 1, prefix), add(scheduler, scripts, 4, 4, 1)
    assert in_order(scheduler, 1) == [cached, short], "3 tokens of it are left, and 4 of the other"
    assert DecodeJumps(scheduler).horizon(1).num_steps == 1, "that step takes a block of its prefix"
    scripts.one_step(scheduler, 1)
    assert in_order(scheduler, 1) == [short, cached]
    assert DecodeJumps(scheduler).horizon(1).num_steps == 0, "the other needs one block, and there is one"
    scripts.one_step(scheduler, 1)
    assert in_order(scheduler, 1) == [cached]


def test_a_long_decode_is_jumped_over_in_few_pieces():
    scheduler = Scheduler(SchedulerSettings(num_blocks=100, block_size=4, max_model_len=400))
    scheduler.add(Request(request_id="r", num_prompt_tokens=8, sampling=SamplingParams(max_tokens=300), arrival_ns=0))
    scripts = Scripts(np.random.default_rng(0))
    scripts.length["r"] = 300
    assert DecodeJumps(scheduler).horizon(0).num_steps == 0, "the prompt has to be scheduled"
    scripts.one_step(scheduler)
    assert DecodeJumps(scheduler).horizon(0) == Horizon(299, FOREVER_NS), "so many tokens are left; the last ends it"


def test_the_last_token_of_a_prompt_is_no_decode():
    scheduler = Scheduler(
        SchedulerSettings(num_blocks=20, block_size=4, max_model_len=80, max_num_batched_tokens=16, max_num_seqs=8)
    )
    scheduler.add(Request(request_id="r", num_prompt_tokens=17, sampling=SamplingParams(max_tokens=9), arrival_ns=0))
    scripts = Scripts(np.random.default_rng(0))
    scripts.one_step(scheduler)
    assert scheduler.table.num_computed[0] == 16
    assert DecodeJumps(scheduler).horizon(0).num_steps == 0, "its first token is sampled in the next step"
    scripts.one_step(scheduler)
    assert DecodeJumps(scheduler).horizon(0).num_steps == 8


def test_the_horizon_ends_where_blocks_run_out():
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=64))
    scripts = Scripts(np.random.default_rng(0))
    for i in range(2):
        scheduler.add(
            Request(request_id=f"r{i}", num_prompt_tokens=8, sampling=SamplingParams(max_tokens=24), arrival_ns=i)
        )
        scripts.length[f"r{i}"] = 24
    scripts.one_step(scheduler)
    assert DecodeJumps(scheduler).horizon(0).num_steps == 8, "four blocks are left, for 8 more tokens of two sequences"
    scripts.advance(scheduler, 8)
    assert DecodeJumps(scheduler).horizon(0).num_steps == 0
    scripts.one_step(scheduler)
    assert scheduler.counts.num_preemptions == 1


def test_the_horizon_ends_where_a_filled_block_lets_the_next_request_in():
    scheduler = Scheduler(SchedulerSettings(num_blocks=6, block_size=4, max_model_len=24))
    scripts = Scripts(np.random.default_rng(0))
    first = scripts._request(0, 8, 16, b"".join(block_name("stem", 0, b) for b in range(2)))
    scripts.length["r0"] = 16
    scheduler.add(first)
    scripts.one_step(scheduler)
    scripts.one_step(scheduler)  # 9 tokens have KV, in 3 of 6 blocks
    # The next turn needs 5 blocks. It shares 2, but of the other 3 one is kept back: it fits once it shares 3.
    scripts.length["r1"] = 4
    scheduler.add(scripts._request(1, 20, 4, first.block_hashes + scripts.hashes(first, 8, 20)))
    assert DecodeJumps(scheduler).horizon(0).num_steps == 3
    scripts.advance(scheduler, 3)
    assert DecodeJumps(scheduler).horizon(0).num_steps == 0
    scripts.one_step(scheduler)
    assert len(scheduler.waiting) == 0
