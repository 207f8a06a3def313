"""Law: a host tier below the prefix cache changes no token, loses no block, and shows a prefix to its salt alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.fake_device import VOCAB_SIZE, KvDevice, expected_tokens, make_request

from moestro.engine.host_tier import LinearPrices, MeasuredPrices
from moestro.engine.rank import Rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.errors import CopyError

BLOCK_SIZE = 4
MAX_LEN = 48


class CheckingDevice(KvDevice):
    """Fails where a copy reads what was never written. Some of its copies fail, and leave part of the KV copied."""

    def __init__(self, *args, fail_share: float = 0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._fails, self._fail_share = np.random.default_rng(1), fail_share
        self.num_failed = 0

    def move_blocks(self, moves, now_ns: int) -> None:
        if self._fails.random() < self._fail_share:
            self.num_failed += 1
            self.host[moves.kept[1][::2]] = 5
            self.kv[moves.restored[1][::2]] = 5
            raise CopyError("a copy fails, as this test wants it")
        written, read = moves.kept[1].tolist(), moves.restored[0].tolist()
        assert len(set(written)) == len(written), "two blocks are copied to one of the host"
        assert (self.host[read][~np.isin(read, written)] >= 0).all(), "a block is read that was never written"
        super().move_blocks(moves, now_ns)


def make_rank(
    num_blocks: int, host: int, delay: int = 0, fail_share: float = 0.0, *, runs_ahead: bool = False, **bounds
) -> Rank:
    sizes = {"num_blocks": num_blocks, "num_host_blocks": host, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    device = CheckingDevice(num_blocks, BLOCK_SIZE, delay, host, fail_share=fail_share)
    return build_rank(SchedulerSettings(**sizes, **bounds), device, runs_ahead=runs_ahead)


def sessions(rng: np.random.Generator, num: int, num_turns: int) -> list[list]:
    """Turns of several sessions; a turn's prompt is the turn before with new tokens behind, as an agent sends it."""
    turns = []
    for session in range(num):
        tokens, salt = rng.integers(0, VOCAB_SIZE, int(rng.integers(4, 16))).tolist(), rng.choice([None, "a", "b"])
        if rng.random() < 0.5:
            tokens[:8] = range(8)  # a system prompt that sessions share, within their salt
        for turn in range(num_turns):
            request = make_request(f"s{session}.{turn}", tokens, salt=salt, max_tokens=int(rng.integers(1, 6)))
            turns.append(request)
            tokens = [*tokens, *expected_tokens(request), *rng.integers(0, VOCAB_SIZE, 3).tolist()]
            if len(tokens) > MAX_LEN - 8:
                break
    return turns


def serve(rank: Rank, requests: list, rng: np.random.Generator, abort_share: float = 0.0) -> dict[str, list[int]]:
    """Run the requests in a random order of sessions, and check all invariants after each step."""
    waiting, tokens, aborted = list(requests), {}, set()
    for now_ns in range(20_000):
        while waiting and rng.random() < 0.4:
            rank.add(waiting.pop(int(rng.integers(min(4, len(waiting))))), now_ns)
        for output in rank.step(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if rng.random() < abort_share and rank.scheduler.by_id:
            aborted.add(name := next(iter(rank.scheduler.by_id)))
            rank.abort(name, now_ns)
        rank.scheduler.check()
        assert rank.scheduler.state.host.num_used_blocks <= rank.scheduler.settings.num_host_blocks
        if not waiting and not rank.has_work:
            return {name: each for name, each in tokens.items() if name not in aborted}
    raise AssertionError("requests were left over")


@settings(max_examples=num_examples(60, thorough=400))
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 30),
    host=st.sampled_from([1, 3, 12, 40, 100]),
    delay=st.integers(0, 2),
    runs_ahead=st.booleans(),
    max_num_seqs=st.integers(1, 6),
    abort_share=st.sampled_from([0.0, 0.1]),
    block_ns=st.sampled_from([0.0, 3.0, 5.0]),
    forgets=st.booleans(),
    fail_share=st.sampled_from([0.0, 0.2]),
)
def test_every_history_gives_the_tokens_of_the_oracle(
    seed, num_blocks, host, delay, runs_ahead, max_num_seqs, abort_share, block_ns, forgets, fail_share
):
    rng = np.random.default_rng(seed)
    bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 24}
    rank = make_rank(num_blocks, host, delay, fail_share, runs_ahead=runs_ahead, **bounds)
    rank.scheduler.state.host.prices = LinearPrices(block_ns, 1.0)
    requests = sessions(rng, 5, 5)
    half = len(requests) // 2
    tokens = serve(rank, requests[:half], rng, abort_share)
    if forgets:
        rank.forget_cache()
        rank.scheduler.check()
        assert rank.scheduler.state.host.num_used_blocks == 0
    tokens |= serve(rank, requests[half:], rng, abort_share)
    expected = {request.request_id: expected_tokens(request) for request in requests}
    assert tokens == {name: expected[name] for name in tokens}
    if not abort_share:
        assert len(tokens) == len(requests)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_after_failed_copies_the_tokens_are_computed_again(runs_ahead):
    rng, rank = np.random.default_rng(3), make_rank(14, 40, 1, 0.3, runs_ahead=runs_ahead, max_num_seqs=3)
    requests = sessions(rng, 8, 5)
    tokens = serve(rank, requests, rng)
    assert tokens == {request.request_id: expected_tokens(request) for request in requests}
    assert rank.executor._device.num_failed > 3
    assert rank.scheduler.counts.num_failed_copies == rank.executor._device.num_failed


def test_the_histories_reach_the_host_tier():
    rng, rank = np.random.default_rng(7), make_rank(12, 40, max_num_seqs=2)
    serve(rank, sessions(rng, 8, 5), rng)
    host, counts = rank.scheduler.state.host, rank.scheduler.counts
    assert host.num_stored_blocks > 20
    assert host.num_loaded_blocks > 10
    # Kept KV comes back in whole blocks, of which the last one may be part empty.
    num_empty = host.num_loaded_blocks * BLOCK_SIZE - counts.num_host_hit_tokens - counts.num_restored_tokens
    assert 0 <= num_empty < BLOCK_SIZE * max(1, counts.num_preemptions)


def test_these_laws_can_fail_a_device_that_loses_copies_is_caught():
    class Losing(CheckingDevice):
        def move_blocks(self, moves, now_ns: int) -> None:
            self.kv[moves.restored[1]] = 3

    rng, rank = np.random.default_rng(7), make_rank(12, 40, max_num_seqs=2)
    rank.executor._device.__class__ = Losing
    requests = sessions(rng, 8, 5)
    tokens = serve(rank, requests, rng)
    assert tokens != {request.request_id: expected_tokens(request) for request in requests}


@pytest.mark.parametrize("other", [None, "b"])
def test_a_salted_prefix_is_seen_by_its_salt_alone(other):
    rank, rng = make_rank(12, 40), np.random.default_rng(0)
    prompt = list(range(16))
    serve(rank, [make_request("first", prompt, salt="a", max_tokens=1)], rng)
    serve(rank, [make_request(f"fill{i}", range(20 + i, 56 + i), max_tokens=1) for i in range(2)], rng)
    before = rank.scheduler.counts.num_hit_tokens
    serve(rank, [make_request("other", prompt, salt=other, max_tokens=1)], rng)
    assert rank.scheduler.counts.num_hit_tokens == before
    serve(rank, [make_request("same", prompt, salt="a", max_tokens=1)], rng)
    assert rank.scheduler.counts.num_host_hit_tokens == 15, "the last token is computed for its logits"


@pytest.mark.parametrize(("block_ns", "num_hits"), [(3.0, 15), (5.0, 0)])
def test_a_copy_that_costs_more_than_the_computation_is_not_made(block_ns, num_hits):
    rank, rng = make_rank(12, 40), np.random.default_rng(0)
    rank.scheduler.state.host.prices = LinearPrices(block_ns, 1.0)  # a block has four tokens
    serve(rank, [make_request("first", range(16), max_tokens=1)], rng)
    serve(rank, [make_request(f"fill{i}", range(20 + i, 56 + i), max_tokens=1) for i in range(2)], rng)
    serve(rank, [make_request("again", range(16), max_tokens=1)], rng)
    assert rank.scheduler.counts.num_host_hit_tokens == num_hits


def test_blocks_on_the_device_behind_dear_copies_make_these_pay():
    rank = make_rank(24, 40)
    pool, host = rank.scheduler.pool, rank.scheduler.state.host
    host.prices = LinearPrices(5.0, 1.0)
    names = [bytes([i]) * 16 for i in range(4)]
    host.link(names, 0, 4)
    blocks = pool.allocate_many(4)
    pool.remember(blocks, names)
    pool.release(blocks[:2])
    pool.allocate_many(22)  # takes the first two from the device
    assert host.find_prefix(names, []) == (blocks[2:], (0, 1)), "two copies cost 10, and save 16"
    assert host.find_prefix(names[:2], []) == ([], ())
    assert host.find_prefix(names[:3], []) == (blocks[2:3], (0, 1)), "two copies cost 10, and save 12"


def test_blocks_that_the_device_has_too_stay_cached_when_host_memory_is_lost():
    rank = make_rank(24, 40)
    pool, host = rank.scheduler.pool, rank.scheduler.state.host
    names = [bytes([i]) * 16 for i in range(4)]
    host.link(names, 0, 4)
    blocks = pool.allocate_many(4)
    pool.remember(blocks, names)
    pool.release(blocks)
    others = pool.allocate_many(24)
    assert host.find_prefix(names, []) == ([], (0, 1, 2, 3))
    pool.release(others)
    blocks = pool.allocate_many(4)
    host.load(names, blocks)
    pool.remember(blocks, names)
    host.used(names)
    host.take_moves()
    rank.scheduler.state.drop_copies(set())
    assert host.num_used_blocks == 0
    assert pool.find_prefix(names) == blocks
    pool.forget(names[:1])
    assert pool.names_of(blocks) == [], "a child outlives its parent"


def test_a_running_engine_learns_what_its_prompts_cost():
    prices = MeasuredPrices(block_ns=100.0)
    assert prices.computing_ns(0, 16) > prices.copying_ns(1), "before the first prompt a copy pays"
    rank = make_rank(24, 40, max_num_batched_tokens=64)
    rank.step_prices = prices
    rank.add(make_request("r", range(40), max_tokens=1), 0)
    rank.begin(1_000)
    rank.collect(1_000)
    rank.begin(1_000 + 40 * 7)
    assert prices.token_ns == 7.0
