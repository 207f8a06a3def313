"""The KV of a preempted sequence in host memory: what is kept, what is copied back, and what is computed again."""

from __future__ import annotations

import msgspec
import pytest
from support.fake_device import KvDevice, expected_prompt_logprobs, expected_tokens, make_request

from moestro.core.request import ServiceClass
from moestro.engine.block_pool import BlockPool
from moestro.engine.host_tier import HostTier
from moestro.engine.policies.batching import LeastComputedBeFirst
from moestro.engine.rank import Rank, build_rank
from moestro.engine.sequences import Sequence
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError

BLOCK_SIZE, NUM_BLOCKS = 4, 8


def make_rank(num_host_blocks: int, device_class=KvDevice, **bounds: object) -> Rank:
    settings = SchedulerSettings(
        num_blocks=NUM_BLOCKS,
        num_host_blocks=num_host_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=32,
        enable_prefix_caching=False,
        **bounds,
    )
    return build_rank(settings, device_class(NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=num_host_blocks))


def two_that_need_all_blocks(**wishes) -> list:
    return [make_request(f"r{i}", range(i, i + 6), max_tokens=20, arrival_ns=i, **wishes) for i in range(2)]


def serve(rank: Rank, requests: list) -> tuple[dict, dict]:
    tokens, prompts = {}, {}
    for request in requests:
        rank.add(request, 0)
    for now_ns in range(1000):
        for output in rank.step(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.prompt_logprobs is not None:
                prompts[output.request_id] = [(e.token_id, e.logprob) for e in output.prompt_logprobs]
        rank.scheduler.check()
    assert not rank.has_work
    return tokens, prompts


def computed_once(requests: list) -> int:
    """Tokens that all of them compute if none computes one twice; the last of an answer is never computed."""
    return sum(request.num_total_tokens - 1 for request in requests)


def test_what_was_kept_is_not_computed_again():
    requests, rank = two_that_need_all_blocks(), make_rank(NUM_BLOCKS)
    tokens, _ = serve(rank, requests)
    assert tokens == {request.request_id: expected_tokens(request) for request in requests}
    stats = rank.stats()
    assert stats.num_preemptions > 0
    assert stats.num_kept_tokens == stats.num_restored_tokens > 0
    assert rank.executor._device.num_launched_tokens == computed_once(requests)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_it_is_computed_again(num_host_blocks):
    requests, rank = two_that_need_all_blocks(), make_rank(num_host_blocks)
    tokens, _ = serve(rank, requests)
    assert tokens == {request.request_id: expected_tokens(request) for request in requests}
    stats = rank.stats()
    assert stats.num_preemptions > 0
    assert stats.num_kept_tokens == stats.num_restored_tokens == 0
    assert rank.executor._device.num_launched_tokens > computed_once(requests)


def test_a_prompts_logprobs_go_on_where_they_were():
    requests = two_that_need_all_blocks(prompt_logprobs=0)
    rank = make_rank(NUM_BLOCKS, max_chunk=2, max_num_batched_tokens=64)
    tokens, prompts = serve(rank, requests)
    assert tokens == {request.request_id: expected_tokens(request) for request in requests}
    assert prompts == {request.request_id: expected_prompt_logprobs(request) for request in requests}


def test_a_prompt_that_is_preempted_in_its_middle_keeps_its_logprobs():
    request = make_request("r", range(8), max_tokens=2, prompt_logprobs=0)
    rank = make_rank(NUM_BLOCKS, max_chunk=2, max_num_batched_tokens=64)
    rank.add(request, 0)
    for now_ns in range(2):
        rank.executor.submit(rank.scheduler.schedule(now_ns), now_ns)
        rank.scheduler.update(rank.executor.poll(now_ns), now_ns)
    rank.scheduler.state.preempt(rank.scheduler.by_id["r"].slot, keeps=True)
    _, prompts = serve(rank, [])
    assert prompts == {"r": expected_prompt_logprobs(request)}


def evicted(rank: Rank, requests: list) -> None:
    """Steps until one of `requests` was given up."""
    for request in requests:
        rank.add(request, 0)
    for now_ns in range(100):
        rank.step(now_ns)
        if rank.stats().num_preemptions:
            return
    raise AssertionError("no sequence was evicted")


def test_who_leaves_while_it_waits_leaves_nothing():
    requests, rank = two_that_need_all_blocks(), make_rank(NUM_BLOCKS)
    evicted(rank, requests)
    assert rank.scheduler.state.host.num_free_tokens < NUM_BLOCKS * BLOCK_SIZE
    rank.abort("r1", 50)
    rank.scheduler.check()
    assert rank.scheduler.state.host.num_free_tokens == NUM_BLOCKS * BLOCK_SIZE


def test_a_prefix_that_is_still_cached_is_shared_and_the_rest_copied():
    settings = SchedulerSettings(num_blocks=16, num_host_blocks=16, block_size=BLOCK_SIZE, max_model_len=32)
    rank = build_rank(settings, KvDevice(16, BLOCK_SIZE, num_host_blocks=16))
    requests = [make_request("r", range(9), max_tokens=9)]
    rank.add(requests[0], 0)
    first = [output.token_ids for now_ns in range(3) for output in rank.step(now_ns)]
    rank.scheduler.update(rank.executor.poll(3), 3)
    slot = rank.scheduler.by_id["r"].slot
    rank.scheduler.state.preempt(slot, keeps=True)  # 11 tokens with KV: two full blocks, and one that is not
    kept = rank.stats().num_kept_tokens
    plan = rank.scheduler.schedule(4)
    assert len(first) == 2
    assert plan.units.start.tolist() == [kept]
    assert plan.moves.kept.shape == (2, 1), "copies that no plan reads were made"
    assert plan.moves.restored.shape == (2, 1), "the cached blocks were copied too"
    assert rank.stats().num_restored_tokens == kept - 2 * BLOCK_SIZE


def test_these_tests_can_fail_a_device_that_forgets_copies_is_caught():
    class Forgetful(KvDevice):
        def move_blocks(self, moves, now_ns: int) -> None:
            self.host[:] = -1

    requests, rank = two_that_need_all_blocks(), make_rank(NUM_BLOCKS, Forgetful)
    tokens, _ = serve(rank, requests)
    assert tokens["r1"] != expected_tokens(requests[1])


def test_a_negative_number_of_blocks_is_refused():
    with pytest.raises(ConfigError, match="num_host_blocks must be at least 0"):
        make_rank(-1)


def test_kv_that_just_fits_is_kept():
    host, sequence = HostTier(2, BlockPool(4), BLOCK_SIZE), Sequence(make_request("r", range(8)), 0)
    sequence.blocks = [0, 1]
    assert host.keep(sequence, 8)
    assert host.num_free_tokens == 0


def test_kept_kv_is_not_counted_as_computed_yet():
    requests, rank = two_that_need_all_blocks(), make_rank(NUM_BLOCKS)
    evicted(rank, requests)
    waits = rank.scheduler.by_id["r1"]
    assert waits.num_kept == waits.num_tokens - 1
    assert rank.stats().queued_prefill_tokens == 1


def test_two_victims_are_not_promised_the_same_room():
    settings = SchedulerSettings(
        num_blocks=16,
        num_host_blocks=10,
        block_size=BLOCK_SIZE,
        max_model_len=60,
        max_num_batched_tokens=128,
        scheduling_policy="qllm",
        evict_policy="least_computed_be_first",
        enable_prefix_caching=False,
    )
    rank, seen = build_rank(settings, KvDevice(16, BLOCK_SIZE, num_host_blocks=10)), []

    def watched(view):
        seen.append(view.num_free_host_tokens)
        return LeastComputedBeFirst()(view)

    rank.scheduler.preemption._policy = watched
    for name, length, service_class in (("a", 21, "be"), ("b", 22, "be"), ("ls", 40, "ls")):
        request = make_request(name, range(length), max_tokens=3)
        rank.add(msgspec.structs.replace(request, service_class=ServiceClass(service_class)), 0)
        rank.step(0)
    assert seen == [40, 40 - 24], "the first takes six blocks"
    assert rank.stats().num_preemptions == 2
    assert rank.stats().num_kept_tokens == 22, "there is no room for both"
