"""Law: a host tier below the prefix cache changes no token, loses no block, and shows a prefix to its salt alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.fake_device import VOCAB_SIZE, KvDevice, expected_tokens, make_request

from moestro.engine.host_tier import LinearPrices
from moestro.engine.rank import Rank, build_rank
from moestro.engine.settings import SchedulerSettings

BLOCK_SIZE = 4
MAX_LEN = 48


class SaltedDevice(KvDevice):
    """Stores beside each token the salt of the request that wrote it, and fails where a unit reads another's."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.in_flight = set()

    def move_blocks(self, moves, now_ns: int) -> None:
        written, read = moves.kept[1].tolist(), moves.restored[0].tolist()
        assert len(set(written)) == len(written), "two blocks are copied to one of the host"
        assert (self.host[read][~np.isin(read, written)] >= 0).all(), "a block is read that was never written"
        super().move_blocks(moves, now_ns)


def make_rank(num_blocks: int, host: int, delay: int = 0, *, runs_ahead: bool = False, **bounds) -> Rank:
    sizes = {"num_blocks": num_blocks, "num_host_blocks": host, "block_size": BLOCK_SIZE, "max_model_len": MAX_LEN}
    device = SaltedDevice(num_blocks, BLOCK_SIZE, delay, host)
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
)
def test_every_history_gives_the_tokens_of_the_oracle(
    seed, num_blocks, host, delay, runs_ahead, max_num_seqs, abort_share, block_ns, forgets
):
    rng = np.random.default_rng(seed)
    bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 24}
    rank = make_rank(num_blocks, host, delay, runs_ahead=runs_ahead, **bounds)
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


def test_the_histories_reach_the_host_tier():
    rng, rank = np.random.default_rng(7), make_rank(12, 40, max_num_seqs=2)
    serve(rank, sessions(rng, 8, 5), rng)
    host, counts = rank.scheduler.state.host, rank.scheduler.counts
    assert host.num_stored_blocks > 20
    assert host.num_loaded_blocks > 10
    assert counts.num_host_hit_tokens == host.num_loaded_blocks * BLOCK_SIZE


def test_these_laws_can_fail_a_device_that_loses_copies_is_caught():
    class Losing(SaltedDevice):
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
