"""Law: arrivals, lengths, pool sizes, chunks, delays, evictions and aborts never change a token nor lose a block."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.fake_device import (
    VOCAB_SIZE,
    KvDevice,
    expected_prompt_logprobs,
    expected_tokens,
    make_request,
)
from support.plain_grammar import backend, light, random_grammar
from support.plain_sampling import random_wishes
from support.policy_text import policy_text

from moestro.core.request import ServiceClass, packed_tokens
from moestro.engine.rank import FusedExecutor, build_rank
from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES, ORDER_POLICIES
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.errors import RequestError

BLOCK_SIZE = 4
POLICIES = [
    (order, batch, evict)
    for order in ORDER_POLICIES.names()
    for batch in BATCH_POLICIES.names()
    for evict in EVICT_POLICIES.names()
    if order == "qllm" or evict == "last_in_order"
]


def random_requests(rng: np.random.Generator, num: int, longest: int) -> list:
    """Prompts that share prefixes and are often exact multiples of a block, with every sampling parameter there is."""
    stems = [rng.integers(0, VOCAB_SIZE, longest) for _ in range(3)]
    requests = []
    for i in range(num):
        max_tokens = int(rng.integers(0, 14))
        length = int(rng.integers(1, longest - max_tokens))
        if rng.random() < 0.4:
            length = max(BLOCK_SIZE, length // BLOCK_SIZE * BLOCK_SIZE)
        tokens = stems[rng.integers(3)][:length].copy()
        if rng.random() < 0.3:
            tokens[length // 2 :] = rng.integers(0, VOCAB_SIZE, length - length // 2)
        request = make_request(
            f"r{i}",
            tokens,
            block_size=BLOCK_SIZE,
            salt="tenant" if rng.random() < 0.2 else None,
            arrival_ns=i,
            max_tokens=max_tokens,
            temperature=float(rng.choice([0.0, 1.0])),
            seed=int(rng.integers(2**63)),
            stop_token_ids=tuple(rng.integers(0, VOCAB_SIZE, 2).tolist()),
            prompt_logprobs=0 if rng.random() < 0.25 else None,
            logprobs=1 if rng.random() < 0.25 else None,
            **(random_wishes(rng, VOCAB_SIZE, max_tokens) | random_grammar(rng)),
        )
        whose = {"service_class": ServiceClass(rng.choice(["ls", "be"])), "user": str(rng.choice(["ann", "bob"]))}
        requests.append(msgspec.structs.replace(request, **whose))
    return requests


def serve(rank, requests, rng, *, abort_share: float = 0.0, grammars=None):
    """Run everything to its end. Returns {id: tokens}, {id: prompt logprobs}, {id: reason} and the aborted ids."""
    waiting, tokens, prompts, reasons, aborted = list(requests), {}, {}, {}, set()
    rank.scheduler.use_grammars(grammars or backend(VOCAB_SIZE))
    table = rank.scheduler.table
    for now_ns in range(20_000):
        while waiting and rng.random() < 0.5:
            rank.add(waiting.pop(0), now_ns)
        for output in rank.step(now_ns):
            assert output.request_id not in aborted, "an aborted request answered"
            assert output.request_id not in reasons, "a request answered after its end"
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.prompt_logprobs is not None:
                assert output.request_id not in prompts, "prompt logprobs delivered twice"
                prompts[output.request_id] = [(e.token_id, e.logprob) for e in output.prompt_logprobs]
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        if rng.random() < abort_share:
            victim = requests[rng.integers(len(requests))].request_id
            if victim in rank.scheduler.by_id:
                rank.abort(victim, now_ns)
                aborted.add(victim)
        check_scheduler(rank.scheduler)
        assert table.num_units_in_flight or table.num_sitting_out or not rank.has_work, "idle with runnable work"
        if not waiting and not rank.has_work:
            return tokens, prompts, reasons, aborted
    raise AssertionError("requests were left over")


def check_scheduler(scheduler) -> None:
    """Blocks are conserved; with `fcfs` no running request of a client came after a waiting one of its own."""
    scheduler.check()
    if scheduler.settings.scheduling_policy != "fcfs" or "qllm" in scheduler.settings.batch_policy:
        return
    for client in {sequence.client for sequence in scheduler.by_id.values()}:
        own = [sequence for sequence in scheduler.by_id.values() if sequence.client == client]
        running = [sequence.serial for sequence in own if sequence.slot is not None]
        waiting = [sequence.serial for sequence in own if sequence.slot is None]
        assert max(running, default=-1) < min(waiting, default=len(running) + 1_000), "a later arrival overtook"


def with_clients(requests: list, num_clients: int) -> list:
    """The requests, sent by so many clients in turn."""
    return [msgspec.structs.replace(each, client=f"{i % num_clients}") for i, each in enumerate(requests)]


@settings(max_examples=num_examples(40, thorough=100))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    max_chunk=st.one_of(st.none(), st.integers(1, 9)),
    delay=st.integers(0, 2),
    caching=st.booleans(),
    abort_share=st.sampled_from([0.0, 0.15]),
    policies=st.one_of(st.just(("fcfs", "decode_first", "last_in_order")), st.sampled_from(POLICIES)),
    host=st.sampled_from([0, 3, 40]),
    num_clients=st.integers(1, 4),
)
def test_every_history_gives_the_oracles_tokens(
    seed, num_blocks, max_num_seqs, budget, max_chunk, delay, caching, abort_share, policies, host, num_clients
):
    rng = np.random.default_rng(seed)
    order, batch, evict = policies
    rank = build_rank(
        SchedulerSettings(
            num_blocks=num_blocks,
            num_host_blocks=host,
            block_size=BLOCK_SIZE,
            max_model_len=32,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_chunk=max_chunk,
            scheduling_policy=policy_text(
                order, {"theta_age_s": 30e-9} if order in ("sjf", "prefill_aware", "qllm") else {}
            ),
            batch_policy=policy_text(batch, {"max_batch": 3} if "qllm" in batch else {}),
            evict_policy=evict,
            enable_prefix_caching=caching,
        ),
        KvDevice(num_blocks, BLOCK_SIZE, delay, host),
    )
    requests = with_clients(random_requests(rng, 14, 32), num_clients)
    tokens, prompts, reasons, aborted = serve(rank, requests, rng, abort_share=abort_share)
    for request in requests:
        if request.request_id in aborted:
            continue
        assert tokens[request.request_id] == expected_tokens(request)
        stopped = bool(set(tokens[request.request_id]) & set(request.sampling.stop_token_ids))
        assert reasons[request.request_id] == ("stop" if stopped else "length")
        if request.sampling.prompt_logprobs is not None:
            assert prompts[request.request_id] == expected_prompt_logprobs(request)
    assert rank.scheduler.pool.num_free == num_blocks, "a block leaked"


@settings(max_examples=num_examples(25, thorough=60))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    delay=st.integers(0, 2),
    caching=st.booleans(),
    host=st.sampled_from([0, 40]),
)
def test_an_answer_that_is_resumed_in_another_engine_goes_on_as_it_would_have_in_the_first(
    seed, num_blocks, max_num_seqs, budget, delay, caching, host
):
    """The device's tokens depend on all tokens before, on penalties, on `min_tokens` and on (seed, position)."""
    rng = np.random.default_rng(seed)
    bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "num_host_blocks": host}
    whole = random_requests(rng, 14, 32)
    expected = {request.request_id: expected_tokens(request) for request in whole}
    cuts = {request_id: int(rng.integers(0, max(1, len(tokens)))) for request_id, tokens in expected.items()}
    resumed = [
        msgspec.structs.replace(
            request,
            resumed_token_ids=np.array(expected[request.request_id][: cuts[request.request_id]], np.int32).tobytes(),
        )
        for request in whole
    ]
    rank = build_rank(
        SchedulerSettings(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=32, enable_prefix_caching=caching, **bounds
        ),
        KvDevice(num_blocks, BLOCK_SIZE, delay, host),
    )
    tokens, _, reasons, _ = serve(rank, resumed, rng)
    for request in whole:
        name = request.request_id
        assert tokens[name] == expected[name][cuts[name] :]
        assert reasons[name] == ("stop" if set(tokens[name]) & set(request.sampling.stop_token_ids) else "length")
    assert rank.scheduler.counts.num_queried_tokens == sum(request.num_prompt_tokens for request in whole)
    assert rank.scheduler.pool.num_free == num_blocks, "a block leaked"


def next_piece(flights: list, rng: np.random.Generator):
    """The oldest result, or a part of it; the rest stays in flight."""
    result = flights.pop(0)
    if len(result.slot) > 1 and rng.random() < 0.3:
        cut = int(rng.integers(1, len(result.slot)))
        flights.insert(0, result.select(np.arange(cut, len(result.slot))))
        result = result.select(np.arange(cut))
    return result


@settings(max_examples=num_examples(20, thorough=50))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 24),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 24),
    host=st.sampled_from([0, 3, 40]),
)
def test_several_plans_in_flight_and_results_in_pieces_change_nothing(seed, num_blocks, max_num_seqs, budget, host):
    rng = np.random.default_rng(seed)
    bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "num_host_blocks": host}
    scheduler = Scheduler(SchedulerSettings(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=32, **bounds))
    scheduler.use_grammars(backend(VOCAB_SIZE))
    device, requests = KvDevice(num_blocks, BLOCK_SIZE, num_host_blocks=host), random_requests(rng, 14, 32)
    executor, flights = FusedExecutor(device), []
    arriving, tokens, aborted = list(requests), {}, set()
    for now_ns in range(20_000):
        while arriving and rng.random() < 0.5:
            scheduler.add(arriving.pop(0))
        if len(flights) < 3 and rng.random() < 0.7 and (plan := scheduler.schedule(now_ns)):
            in_flight = {slot for flight in flights for slot in flight.slot.tolist()}
            assert not in_flight & set(plan.units.slot.tolist()), "a sequence is in two plans"
            executor.submit(plan, now_ns)
            flights += device.poll(now_ns)
        if flights and rng.random() < 0.5:
            emitted = scheduler.update(next_piece(flights, rng), now_ns)
            for sequence, token in zip(emitted.sequences, emitted.token_ids, strict=True):
                assert sequence.request.request_id not in aborted
                tokens.setdefault(sequence.request.request_id, []).append(token)
        if rng.random() < 0.05 and scheduler.abort(victim := requests[rng.integers(len(requests))].request_id, now_ns):
            aborted.add(victim)
        scheduler.check()  # not the order: a sequence in flight cannot be evicted, even if it came last
        if not arriving and not flights and not scheduler.has_work:
            break
    for request in requests:
        if request.request_id not in aborted:
            sampled = [token for token in tokens[request.request_id] if token >= 0]
            assert sampled == expected_tokens(request)
    assert scheduler.pool.num_free == num_blocks


def test_no_request_overtakes_for_being_smaller():
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32))
    scheduler.add(make_request("running", range(16), max_tokens=8))
    assert scheduler.schedule(0)
    scheduler.add(make_request("large", range(20, 38), max_tokens=2))
    scheduler.add(make_request("small", range(40, 42), max_tokens=2))
    assert scheduler.schedule(0) is None
    assert len(scheduler.waiting) == 2


@pytest.mark.parametrize(("num_tokens", "admitted"), [(12, True), (13, False)])
def test_a_newcomer_leaves_a_block_for_each_running_sequence(num_tokens, admitted):
    scheduler = Scheduler(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32))
    scheduler.add(make_request("running", range(16), max_tokens=8))
    assert scheduler.schedule(0)  # 4 of 8 blocks are free, and one of them is kept back
    scheduler.add(make_request("new", range(20, 20 + num_tokens), max_tokens=2))
    assert bool(scheduler.schedule(0)) == admitted


def test_a_newcomer_takes_no_block_that_a_running_sequence_has_of_its_prefix():
    rank = build_rank(SchedulerSettings(num_blocks=6, block_size=4, max_model_len=24), KvDevice(6, 4))
    scheduler = rank.scheduler
    scheduler.add(make_request("running", range(12), max_tokens=9))
    rank.executor.submit(scheduler.schedule(0), 0)
    scheduler.update(rank.executor.poll(0), 0)
    scheduler.add(make_request("new", range(16), max_tokens=2))
    assert len(scheduler.schedule(1).units) == 2, "of three free blocks it takes one"


def test_a_block_is_kept_back_although_the_prefix_of_a_newcomer_has_just_gone():
    rank = build_rank(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32), KvDevice(8, 4))
    scheduler = rank.scheduler
    for name, prompt, max_tokens in (
        ("first", range(4), 1),
        ("same", range(8), 9),
        ("other", range(20, 25), 9),
        ("last", range(30, 42), 1),
    ):
        scheduler.add(make_request(name, prompt, max_tokens=max_tokens))
    rank.executor.submit(scheduler.schedule(0), 0)
    scheduler.update(rank.executor.poll(0), 0)
    assert scheduler.pool.num_free == 4, "all cached, the one that `first` had is the oldest"
    scheduler.add(make_request("new", range(9), max_tokens=2))
    # `new` lacks two blocks, until `same` takes the cached one. Then it lacks three, and one of three is for `other`.
    assert len(scheduler.schedule(1).units) == 2
    assert len(scheduler.waiting) == 1


def test_under_fcfs_no_priority_pushes_out_who_came_before():
    rank = build_rank(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32), KvDevice(8, 4))
    ended = []
    rank.add(make_request("old", range(6), max_tokens=20), 0)
    for i in range(3):
        rank.add(msgspec.structs.replace(make_request(f"new{i}", range(i, i + 6), max_tokens=20), priority=-1), 0)
    for now_ns in range(500):
        ended += [output.request_id for output in rank.step(now_ns) if output.finish_reason]
    assert ended == ["old", "new0", "new1", "new2"]


def test_the_law_can_fail_a_device_that_writes_one_block_wrong_is_caught():
    class Forgetful(KvDevice):
        def _write(self, units, i, tokens):
            if units.start[i] != 8:
                super()._write(units, i, tokens)

    rank = build_rank(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32), Forgetful(8, 4))
    request = make_request("r", range(6), max_tokens=8)
    tokens, *_ = serve(rank, [request], np.random.default_rng(0))
    assert tokens["r"] != expected_tokens(request)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"])
def test_the_law_can_fail_a_device_that_ignores_a_wish_is_caught(name):
    class Deaf(KvDevice):
        def _read_all(self, units):
            return super()._read_all(msgspec.structs.replace(units, edits=None))

    wish = ((3, 9.0),) if name == "logit_bias" else 1.9
    request = make_request("r", range(6), max_tokens=20, **{name: wish})
    rank = build_rank(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32), Deaf(8, 4))
    tokens, *_ = serve(rank, [request], np.random.default_rng(0))
    assert tokens["r"] != expected_tokens(request)


@pytest.mark.parametrize(
    "wish",
    [
        {"allowed_tokens": packed_tokens((3, 4))},
        {"bad_words": ((3,), (4,))},
        {"grammar": light("(yz|x)*")},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_the_law_can_fail_a_device_that_ignores_a_mask_or_a_ban_is_caught(wish):
    class Lax(KvDevice):
        def _read_all(self, units):
            nothing = np.empty((2, 0), np.int32)
            edits = None if units.edits is None else msgspec.structs.replace(units.edits, masks=(), banned=nothing)
            return super()._read_all(msgspec.structs.replace(units, edits=edits))

    found = []
    for device in (KvDevice(16, 4), Lax(16, 4)):
        rank = build_rank(SchedulerSettings(num_blocks=16, block_size=4, max_model_len=64), device)
        request = make_request("r", range(6), max_tokens=30, temperature=1.0, **wish)
        tokens, *_ = serve(rank, [request], np.random.default_rng(0))
        found.append(tokens["r"] == expected_tokens(request))
    assert found == [True, False]


def test_a_request_for_no_tokens_ends_with_its_prompts_logprobs_and_no_token():
    device = KvDevice(8, 4)
    rank = build_rank(
        SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=64), device
    )
    request = make_request("r", range(32), max_tokens=0, prompt_logprobs=0)
    tokens, prompts, reasons, _ = serve(rank, [request], np.random.default_rng(0))
    assert (tokens["r"], reasons["r"]) == ([], "length")
    assert prompts["r"] == expected_prompt_logprobs(request)
    assert device.num_launched_tokens == 32


def test_no_stop_token_comes_before_min_tokens():
    rank = build_rank(SchedulerSettings(num_blocks=16, block_size=4, max_model_len=64), KvDevice(16, 4))
    stops = tuple(range(VOCAB_SIZE - 1))
    request = make_request("r", range(6), max_tokens=20, min_tokens=7, stop_token_ids=stops)
    tokens, *_ = serve(rank, [request], np.random.default_rng(0))
    assert tokens["r"][:7] == [VOCAB_SIZE - 1] * 7
    assert tokens["r"][-1] in stops


def test_a_plan_carries_edits_only_while_a_unit_that_samples_asks_for_some():
    rank = build_rank(SchedulerSettings(num_blocks=32, block_size=4, max_model_len=64, max_chunk=8), KvDevice(32, 4))
    rank.add(make_request("plain", range(3), max_tokens=30), 0)
    rank.add(make_request("other", range(20), max_tokens=5, min_tokens=2, stop_token_ids=(1,)), 0)
    banned = []
    for _ in range(9):
        plan = rank.scheduler.schedule(0)
        edits = plan.units.edits
        banned.append(None if edits is None else edits.banned.tolist())
        rank.executor.submit(plan, 0)
        rank.scheduler.update(rank.executor.poll(0), 0)
    # Two chunks of the prompt, then the one that samples, and one token more.
    assert banned == [None, None, [[1], [1]], [[1], [1]], None, None, None, None, None]


@pytest.mark.parametrize("policies", POLICIES, ids="-".join)
def test_every_combination_of_policies_brings_everything_to_its_end(policies):
    """Few blocks, so that all of them evict: the same tokens, and never idle with runnable work."""
    order, batch, evict = policies
    num_preemptions = 0
    for seed in range(4):
        if num_preemptions and seed >= num_examples(2, thorough=4):
            break
        rng = np.random.default_rng(seed)
        rank = build_rank(
            SchedulerSettings(
                num_blocks=9,
                block_size=BLOCK_SIZE,
                max_model_len=32,
                max_num_seqs=6,
                max_num_batched_tokens=20,
                scheduling_policy=order,
                batch_policy=batch,
                evict_policy=evict,
            ),
            KvDevice(9, BLOCK_SIZE),
        )
        requests = random_requests(rng, 10, 32)
        tokens, *_ = serve(rank, requests, rng)
        assert tokens == {request.request_id: expected_tokens(request) for request in requests}
        num_preemptions += rank.stats().num_preemptions
    assert num_preemptions > 0


def test_the_last_outputs_have_the_preemptions_of_their_requests():
    rng = np.random.default_rng(0)
    settings = SchedulerSettings(
        num_blocks=9, block_size=BLOCK_SIZE, max_model_len=32, max_num_seqs=6, max_num_batched_tokens=20
    )
    rank = build_rank(settings, KvDevice(9, BLOCK_SIZE))
    requests = [each for each in random_requests(rng, 30, 32) if each.sampling.grammar is None]
    for request in requests:
        rank.add(request, 0)
    ended = {}
    for now_ns in range(2000):
        rank.begin(now_ns)
        ended |= {each.request_id: each for each in rank.outputs(now_ns) if each.finish_reason is not None}
    assert ended.keys() == {request.request_id for request in requests}
    assert sum(output.num_preemptions for output in ended.values()) == rank.stats().num_preemptions > 0


def test_a_full_prefix_hit_computes_one_token_and_writes_no_shared_block():
    device = KvDevice(16, BLOCK_SIZE)
    rank = build_rank(SchedulerSettings(num_blocks=16, block_size=BLOCK_SIZE, max_model_len=32), device)
    rng = np.random.default_rng(0)
    first = make_request("first", range(8), max_tokens=1)
    serve(rank, [first], rng)
    before, computed = device.kv.copy(), device.num_launched_tokens
    second = make_request("second", range(8), max_tokens=1)
    tokens, *_ = serve(rank, [second], rng)
    assert tokens["second"] == expected_tokens(second)
    assert device.num_launched_tokens == computed + 1
    assert (device.kv == before).all()


@pytest.mark.parametrize(("salt", "num_cached"), [(None, 8), ("other tenant", 0)])
def test_a_salt_of_ones_own_hits_nothing_of_anybody_else(salt, num_cached):
    rank = build_rank(SchedulerSettings(num_blocks=16, block_size=4, max_model_len=32), KvDevice(16, 4))
    rng = np.random.default_rng(0)
    serve(rank, [make_request("first", range(10), max_tokens=2)], rng)
    rank.add(make_request("second", range(10), max_tokens=2, salt=salt), 0)
    outputs = [output for now_ns in range(9) for output in rank.step(now_ns)]
    assert outputs[0].num_cached_tokens == num_cached


def test_an_abort_frees_every_block_within_one_step_even_with_a_unit_in_flight():
    rank = build_rank(SchedulerSettings(num_blocks=16, block_size=4, max_model_len=32), KvDevice(16, 4, delay=1))
    rank.add(make_request("r", range(10), max_tokens=9), 0)
    rank.step(0)
    rank.abort("r", 1)
    assert rank.scheduler.pool.num_free < 16, "its blocks may still be written to"
    while rank.has_work:
        assert rank.step(2) == []
    assert rank.scheduler.pool.num_free == 16


def test_a_request_that_can_never_fit_is_refused_at_once():
    rank = build_rank(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32), KvDevice(8, 4))
    with pytest.raises(RequestError, match=r"maximum context length is 32 tokens.*30 input.*3 output") as refused:
        rank.add(make_request("r", range(30), max_tokens=3), 0)
    assert refused.value.code == "context_length_exceeded"
    rank.add(make_request("r", range(30), max_tokens=2), 0)


def test_a_full_queue_refuses_with_retry_after():
    rank = build_rank(
        SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32, max_num_queued_reqs=1), KvDevice(8, 4)
    )
    rank.add(make_request("a", range(3)), 0)
    with pytest.raises(RequestError, match="queue is full") as refused:
        rank.add(make_request("b", range(3)), 0)
    assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1)


def test_when_blocks_run_out_the_latest_is_evicted_and_recomputed():
    rank = build_rank(SchedulerSettings(num_blocks=8, block_size=4, max_model_len=32), KvDevice(8, 4))
    requests = [make_request(f"r{i}", range(i, i + 6), max_tokens=20, arrival_ns=i) for i in range(2)]
    tokens, *_ = serve(rank, requests, np.random.default_rng(0))
    assert rank.stats().num_preemptions > 0
    assert all(tokens[r.request_id] == expected_tokens(r) for r in requests)


def test_a_step_never_exceeds_the_token_budget_and_decodes_are_never_held_up():
    device = KvDevice(32, 4)
    rank = build_rank(
        SchedulerSettings(num_blocks=32, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8),
        device,
    )
    rank.add(make_request("talker", range(3), max_tokens=20), 0)
    rank.step(0)
    rank.step(1)
    rank.add(make_request("long", range(40), max_tokens=2), 2)
    steps = [[o.request_id for o in rank.step(now_ns)] for now_ns in range(2, 10)]
    assert all("talker" in ids for ids in steps)
    assert device.largest_step == 8
