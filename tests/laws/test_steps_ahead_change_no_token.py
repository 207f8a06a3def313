"""Law: a step that is launched before the host has the tokens of the step before it changes no token nor block."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.test_schedule_never_changes_tokens import BLOCK_SIZE, POLICIES, random_requests, serve
from support.examples import num_examples
from support.fake_device import VOCAB_SIZE, KvDevice, expected_prompt_logprobs, expected_tokens, make_request
from support.late_masks import LateMasks
from support.plain_grammar import PATTERNS, backend, light

from moestro.core.request import Grammar, ServiceClass, packed_tokens
from moestro.core.work import FROM_STEP_BEFORE, LOGITS_LAST
from moestro.engine.rank import NextStep, build_rank
from moestro.engine.settings import SchedulerSettings

SIZES = {"num_blocks": 40, "block_size": BLOCK_SIZE, "max_model_len": 64}


def count_next_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units of each step that is launched ahead from now on."""
    plan, counts = NextStep.plan, []

    def counting(next_step: NextStep, now_ns: int):
        found = plan(next_step, now_ns)
        counts.extend([] if found is None else [len(found.units)])
        return found

    monkeypatch.setattr(NextStep, "plan", counting)
    return counts


class WatchedDevice(KvDevice):
    """Checks at each launch and poll that no block which a launched step writes belongs to another sequence."""

    rank = None

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.in_flight: deque = deque()
        self.num_ahead = self.num_mixed = self.num_useless = 0

    def launch(self, item, now_ns: int) -> None:
        units = item.units
        assert len(self.in_flight) <= 1, "a step ahead follows one step in flight"
        first_tokens = units.token_ids[np.cumsum(units.num_tokens) - units.num_tokens]
        following = units.slot[first_tokens == FROM_STEP_BEFORE].tolist()
        assert np.count_nonzero(units.token_ids == FROM_STEP_BEFORE) == len(following)
        for before in self.in_flight:
            assert set(following) <= set(before.slot[before.logits & LOGITS_LAST > 0].tolist())
            self.num_ahead += 1
            self.num_mixed += int(units.num_tokens.max() > 1)
        self.in_flight.append(units)
        super().launch(item, now_ns)
        self.check()

    def poll(self, now_ns: int):
        self.check()
        results = super().poll(now_ns)
        for _ in results:
            units = self.in_flight.popleft()
            table = self.rank.scheduler.table
            self.num_useless += sum(table.at(slot).is_leaving for slot in units.slot.tolist())
        return results

    def check(self) -> None:
        table, pool = self.rank.scheduler.table, self.rank.scheduler.pool
        assert pool is not None
        for units in self.in_flight:
            for row, (slot, serial) in enumerate(zip(units.slot.tolist(), units.serial.tolist(), strict=True)):
                sequence = table.at(slot)
                assert sequence.serial == serial, "another sequence has the slot of a unit in flight"
                end = int(units.start[row] + units.num_tokens[row])
                for block in range(int(units.write_start[row]) // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                    written = int(units.block_tables[row, block])
                    assert sequence.blocks[block] == written
                    others = [each for each in table.at_all(table.running) if each is not sequence]
                    assert not any(written in each.blocks for each in others), "a block of a unit in flight is shared"


def ahead_rank(device: WatchedDevice, **bounds):
    rank = build_rank(SchedulerSettings(**bounds), device, runs_ahead=True)
    device.rank = rank
    return rank


@settings(max_examples=num_examples(30, thorough=80))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    delay=st.integers(0, 3),
    caching=st.booleans(),
    abort_share=st.sampled_from([0.0, 0.15]),
    policies=st.one_of(st.just(("fcfs", "decode_first", "last_in_order")), st.sampled_from(POLICIES)),
    host=st.sampled_from([0, 3, 40]),
)
def test_every_history_gives_the_oracles_tokens(
    seed, num_blocks, max_num_seqs, budget, delay, caching, abort_share, policies, host
):
    rng = np.random.default_rng(seed)
    order, batch, evict = policies
    device = WatchedDevice(num_blocks, BLOCK_SIZE, delay, host)
    rank = ahead_rank(
        device,
        num_blocks=num_blocks,
        num_host_blocks=host,
        block_size=BLOCK_SIZE,
        max_model_len=32,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        scheduling_policy=order,
        batch_policy=batch,
        evict_policy=evict,
        enable_prefix_caching=caching,
    )
    requests = random_requests(rng, 14, 32)
    tokens, prompts, reasons, aborted = serve(rank, requests, rng, abort_share=abort_share)
    for request in requests:
        if request.request_id in aborted:
            continue
        assert tokens[request.request_id] == expected_tokens(request)
        if request.sampling.prompt_logprobs is not None:
            assert prompts[request.request_id] == expected_prompt_logprobs(request)
        stopped = bool(set(tokens[request.request_id]) & set(request.sampling.stop_token_ids))
        assert reasons[request.request_id] == ("stop" if stopped else "length")
    assert rank.scheduler.pool.num_free == num_blocks, "a block leaked"
    assert rank.scheduler.counts.num_dropped_rows == device.num_useless
    assert rank.scheduler.state.num_leaving == 0


def run(rank, requests, now_ns: int = 0) -> dict[str, list[int]]:
    """Serve the requests, which come at once."""
    tokens: dict[str, list[int]] = {}
    for request in requests:
        rank.add(request, now_ns)
    while rank.has_work:
        now_ns += 1
        for output in rank.step(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def decoding(name: str, num: int = 20, **wishes):
    return make_request(name, [1, 2, len(name)], max_tokens=num, **wishes)


def test_all_decodes_but_the_first_are_launched_ahead():
    device = WatchedDevice(40, BLOCK_SIZE, 1)
    rank = ahead_rank(device, **SIZES)
    requests = [decoding("a"), decoding("bb", temperature=1.0, seed=4, logprobs=2)]
    assert run(rank, requests) == {request.request_id: expected_tokens(request) for request in requests}
    assert (rank.num_steps, device.num_ahead) == (20, 19)
    assert rank.stats().num_dropped_rows == 0


def test_an_answer_that_stops_costs_one_row_more():
    plain = decoding("a")
    stop = expected_tokens(plain)[7]
    at = expected_tokens(plain).index(stop)
    device = WatchedDevice(40, BLOCK_SIZE, 1)
    rank = ahead_rank(device, **SIZES)
    requests = [decoding("a", stop_token_ids=(stop,)), decoding("bb")]
    tokens = run(rank, requests)
    assert tokens["a"] == expected_tokens(plain)[: at + 1]
    assert rank.stats().num_dropped_rows == device.num_useless == 1
    assert device.num_launched_tokens == 3 + 3 + at + 1 + 19


BIAS = tuple((token, 2.0 * (token % 3 - 1)) for token in range(VOCAB_SIZE))
WISHES = (
    {"presence_penalty": 1.0},
    {"frequency_penalty": -1.5},
    {"repetition_penalty": 1.7, "presence_penalty": -0.3, "temperature": 1.0, "seed": 3},
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
    {"bad_words": ((5,), *((a, b) for a in range(VOCAB_SIZE) for b in range(a % 4, VOCAB_SIZE, 2)), (1, 2, 3))},
    {"logit_bias": BIAS, "allowed_tokens": packed_tokens(range(0, VOCAB_SIZE, 3))},
    {"logprobs": 2, "prompt_logprobs": 1},
)


@pytest.mark.parametrize("wish", WISHES, ids="-".join)
def test_changes_to_logits_need_no_token_on_the_host(wish):
    device = WatchedDevice(40, BLOCK_SIZE, 1)
    requests = [decoding("a", **wish), decoding("bb")]
    rank = ahead_rank(device, **SIZES)
    assert run(rank, requests) == {request.request_id: expected_tokens(request) for request in requests}
    assert device.num_ahead == rank.stats().num_steps_ahead == 19


@pytest.mark.parametrize(("num_others", "most_steps"), [(1, 41), (16, 40)])
def test_a_grammar_takes_every_other_step_beside_many_others_which_run_ahead(num_others, most_steps):
    """With few others the batch waits for it, because it would lose more than they gain."""
    device = WatchedDevice(400, BLOCK_SIZE, 1)
    rank = ahead_rank(device, **(SIZES | {"num_blocks": 400, "max_num_seqs": 20}))
    rank.scheduler.use_grammars(backend(VOCAB_SIZE))
    followed = decoding("g", 12, grammar=light(PATTERNS[0]))
    others = [decoding("a" * (1 + each), 40) for each in range(num_others)]
    tokens = run(rank, [followed, *others])
    assert tokens == {request.request_id: expected_tokens(request) for request in [followed, *others]}
    assert rank.num_steps <= most_steps
    assert (device.num_ahead >= rank.num_steps - 2) == (num_others == 16)


def test_a_mask_that_never_comes_stops_no_step_ahead():
    device = WatchedDevice(400, BLOCK_SIZE, 1)
    rank = ahead_rank(device, **SIZES)
    rank.scheduler.use_grammars(LateMasks(VOCAB_SIZE, lambda _: 10**9))
    rank.add(decoding("g", 12, grammar=Grammar("regex", PATTERNS[0])), 0)
    rank.add(decoding("a", 40), 0)
    for now_ns in range(120):
        rank.step(now_ns)
    assert device.num_ahead >= 36


def after_some_steps(device: WatchedDevice, *requests, **bounds):
    """A rank with the requests, and two steps in flight."""
    rank = ahead_rank(device, **SIZES, **bounds)
    for request in requests:
        rank.add(request, 0)
    while rank.num_steps < 9 or len(device.in_flight) < 2:
        rank.step(0)
    return rank


def test_a_request_joins_the_step_after_the_launched_one_which_is_launched_ahead_too():
    device = WatchedDevice(40, BLOCK_SIZE, 2)
    rank = after_some_steps(device, decoding("a", 40))
    rank.add(decoding("bb"), 9)
    num_before = rank.num_steps
    while len(device.in_flight[-1].slot) == 1:
        rank.step(10)
    assert rank.num_steps == num_before + 1
    assert run(rank, [])["bb"] == expected_tokens(decoding("bb"))
    assert (device.num_mixed, device.num_ahead) == (1, rank.num_steps - 1)


def test_chunks_of_a_prompt_follow_each_other():
    device = WatchedDevice(40, BLOCK_SIZE, 1)
    request = make_request("r", range(33), max_tokens=6)
    rank = ahead_rank(device, **SIZES, max_chunk=4)
    assert run(rank, [request, decoding("a")])["r"] == expected_tokens(request)
    assert (device.num_mixed, device.num_ahead) == (7, rank.num_steps - 1)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_request_finds_the_prefix_that_a_step_in_flight_computes(runs_ahead):
    rank = build_rank(SchedulerSettings(**SIZES), KvDevice(40, BLOCK_SIZE, 2), runs_ahead=runs_ahead)
    first, same = (make_request(name, range(30), max_tokens=4) for name in ("first", "same"))
    rank.add(first, 0)
    rank.step(0)
    assert rank.scheduler.table.num_units_in_flight
    assert run(rank, [same])["same"] == expected_tokens(same)
    assert rank.scheduler.counts.num_hit_tokens == 28


def test_a_waiting_request_may_preempt_best_effort_ones_when_the_steps_in_flight_are_done():
    def best_effort(name: str):
        return msgspec.structs.replace(decoding(name, 40), service_class=ServiceClass.BE)

    device = WatchedDevice(40, BLOCK_SIZE, 1)
    policies = {"scheduling_policy": "qllm", "evict_policy": "least_computed_be_first"}
    rank = after_some_steps(device, best_effort("a"), best_effort("bb"), max_num_seqs=2, **policies)
    rank.add(decoding("urgent", 8), 1)
    tokens = run(rank, [])
    assert tokens["urgent"] == expected_tokens(decoding("urgent", 8))
    assert rank.stats().num_preemptions == 1


def test_a_pool_without_a_free_block_ends_steps_ahead_and_preempts():
    device = WatchedDevice(10, BLOCK_SIZE, 1)
    requests = [decoding(name, 24) for name in ("a", "bb", "ccc")]
    rank = ahead_rank(device, num_blocks=10, block_size=BLOCK_SIZE, max_model_len=32, enable_prefix_caching=False)
    assert run(rank, requests) == {request.request_id: expected_tokens(request) for request in requests}
    assert rank.stats().num_preemptions > 0


def test_an_abort_keeps_the_blocks_until_the_steps_that_write_them_are_done():
    device = WatchedDevice(40, BLOCK_SIZE, 3)
    rank = ahead_rank(device, **SIZES)
    rank.add(decoding("a", 40), 0)
    while len(device.in_flight) < 2:
        rank.step(0)
    num_free = rank.scheduler.pool.num_free
    rank.abort("a", 0)
    assert rank.scheduler.pool.num_free == num_free
    assert run(rank, []) == {}
    assert rank.scheduler.pool.num_free == 40
    assert rank.stats().num_dropped_rows == 2


def test_the_law_can_fail_blocks_that_are_released_with_the_answers_end_are_caught(monkeypatch):
    monkeypatch.setattr(
        "moestro.engine.scheduler_state.SchedulerState.leave",
        lambda state, sequence: state._release_slot(sequence.slot),
    )
    device = WatchedDevice(40, BLOCK_SIZE, 1)
    plain = decoding("a")
    requests = [decoding("a", stop_token_ids=(expected_tokens(plain)[4],)), decoding("bb")]
    with pytest.raises(AssertionError):
        run(ahead_rank(device, **SIZES), requests)


def test_the_law_can_fail_a_step_ahead_that_has_another_slots_token_is_caught():
    class Mixed(WatchedDevice):
        def _known(self, units, i, tokens):
            known = super()._known(units, i, tokens)
            return (known + 1) % VOCAB_SIZE if tokens[0] == FROM_STEP_BEFORE else known

    requests = [decoding("a"), decoding("bb")]
    tokens = run(ahead_rank(Mixed(40, BLOCK_SIZE, 1), **SIZES), requests)
    assert tokens["a"] != expected_tokens(requests[0])


def test_a_rank_that_does_not_run_ahead_plans_no_next_step(monkeypatch):
    def forbidden(*_):
        raise AssertionError("a next step is planned")

    monkeypatch.setattr(NextStep, "plan", forbidden)
    rank = build_rank(SchedulerSettings(**SIZES), KvDevice(40, BLOCK_SIZE, 1))
    assert run(rank, [decoding("a")])["a"] == expected_tokens(decoding("a"))
