"""Preble's E2: exploit a long prefix, explore by GPU time, and move requests from an overloaded engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.routers import BLOCK_SIZE, request, router

from moestro.errors import ConfigError
from moestro.routing.policies.preble import Preble
from moestro.routing.registry import policy_from
from moestro.routing.settings import EngineSpec

S = 1_000_000_000
TOKEN_NS = 1_000  # of prefill
GAP_NS = 1_000_000  # between two tokens of an answer


def by_length(p_tokens, queued_tokens, batch):
    return p_tokens * float(TOKEN_NS)


def preble(**settings) -> Preble:
    return Preble(predict_ttft_ns=by_length, **settings)


def tokens(seed: int, num_blocks: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 1 << 30, num_blocks * BLOCK_SIZE).tolist()


def serve(it, name, prompt, at_ns, num_output_tokens=0) -> int:
    """Send a request whose first token comes at once and whose answer ends GAP_NS a token later."""
    engine = it.submit(request(name, prompt=prompt), at_ns).engine
    it.first_token(name, at_ns)
    it.ended(name, at_ns + max(num_output_tokens - 1, 0) * GAP_NS, num_output_tokens or None)
    return engine


def test_a_hit_over_half_of_the_prompt_is_exploited_whatever_the_load_and_a_shorter_one_is_not():
    it = router(2, preble())
    head = tokens(1, 10)
    home = serve(it, "a", head, 0)
    assert serve(it, "b", head + tokens(2, 9), S) == home  # 10 of 19 blocks
    assert serve(it, "c", head + tokens(3, 11), 2 * S) == 1 - home  # 10 of 21: explore, and the other has done nothing


def test_an_explored_request_goes_to_the_engine_that_did_the_least_in_the_window():
    it = router(3, preble(window_s=10))
    first = [serve(it, str(i), tokens(i, 4 * (i + 1)), 0) for i in range(3)]
    assert sorted(first) == [0, 1, 2]
    assert serve(it, "d", tokens(9, 1), S) == first[0]  # it computed 4 blocks, the others 8 and 12
    it.submit(request("e", prompt=tokens(10, 40)), 2 * S)
    engine = it.submit(request("f", prompt=tokens(11, 1)), 30 * S).engine  # all work has left the window
    assert engine in (0, 1, 2)


def test_decoded_answers_count_as_load_by_mean_length_and_measured_gap():
    it = router(2, preble())
    long = [serve(it, f"w{i}", tokens(20 + i, 1), i * S, num_output_tokens=100) for i in range(4)]
    assert sorted(long) == [0, 0, 1, 1]
    # A hundred gaps weigh more than a prefill of 90 blocks, so its engine still has the smaller number of requests.
    huge = serve(it, "huge", tokens(50, 90), 5 * S, num_output_tokens=100)
    assert serve(it, "next", tokens(51, 1), 6 * S, num_output_tokens=100) == 1 - huge
    assert {serve(it, f"r{i}", tokens(52 + i, 1), (7 + i) * S, num_output_tokens=100) for i in range(2)} == {0, 1}


def test_what_a_request_would_evict_counts_by_its_share_of_requests():
    small = EngineSpec(num_blocks=20)
    it = router(2, preble(), spec=small)
    popular, rare = tokens(1, 12), tokens(2, 14)
    home = serve(it, "p0", popular, 0)
    assert serve(it, "r0", rare, 0) == 1 - home
    for i in range(6):
        assert serve(it, f"p{i + 1}", popular, 1) == home
    # The rare engine has computed more, but the newcomer would evict the popular prompt on the other one.
    assert serve(it, "new", tokens(3, 15), 2) == 1 - home
    unlimited = router(2, preble())
    home = serve(unlimited, "p0", popular, 0)
    serve(unlimited, "r0", rare, 0)
    for i in range(6):
        serve(unlimited, f"p{i + 1}", popular, 1)
    assert serve(unlimited, "new", tokens(3, 15), 2) == home, "without evictions the engine that computed less"


def test_an_overloaded_engine_hands_over_its_prefix():
    it = router(2, preble(balance_ratio=2, min_requests=10))
    head = tokens(1, 10)
    engines = [serve(it, str(i), head + tokens(i + 2, 4), i) for i in range(40)]
    assert len(set(engines[:10])) == 1, "the loads say little yet"
    assert engines[10] != engines[9]
    assert len(set(engines[-4:])) == 2, "both hold the prefix now, and share the load"


def test_the_window_forgets_and_a_lost_engine_has_no_load():
    policy = preble(window_s=5)
    it = router(2, policy)
    rng = random.Random(0)
    for i in range(300):
        serve(it, str(i), tokens(rng.randrange(6), rng.randrange(1, 30)), i * S // 10, num_output_tokens=3)
    assert sum(len(sent) for sent in policy._sent_to.values()) <= 51
    assert sum(policy._tree.num_blocks.values()) <= 51 * 30
    assert policy._length_sum == 3 * len(policy._lengths) <= 3 * 51
    for engine in (0, 1):
        it.engine_lost(engine, 31 * S)
    assert not any(policy._sent_to.values())
    assert len(policy._tree) == 0
    assert policy._answers == {}


def test_law_decisions_are_those_of_a_plain_reading_of_e2():
    """The oracle keeps a list of all requests, and computes L, M = 0 and P from scratch."""
    rng = random.Random(3)
    it, sent, heads = router(3, preble(min_requests=1 << 30)), [], [tokens(100 + i, 8) for i in range(5)]
    held: list[set[bytes]] = [set(), set(), set()]
    for i in range(200):
        prompt = rng.choice(heads) + tokens(1000 + i, rng.randrange(1, 16))
        fields = request(str(i), prompt=prompt)
        names = [fields.block_hashes[at : at + 16] for at in range(0, len(fields.block_hashes), 16)]
        hits = []
        for engine in range(3):
            depth = 0
            while depth < len(names) and names[depth] in held[engine]:
                depth += 1
            hits.append(depth * BLOCK_SIZE)
        load = [sum(cost for at, where, cost in sent if where == engine) for engine in range(3)]
        costs = [load[e] + (len(prompt) - hits[e]) * TOKEN_NS for e in range(3)]
        best = max(hits)
        among = [e for e in range(3) if hits[e] == best] if best > len(prompt) - best else [0, 1, 2]
        chosen = it.submit(fields, i).engine
        assert chosen in [e for e in among if costs[e] == min(costs[f] for f in among)]
        it.ended(str(i), i)
        sent.append((i, chosen, (len(prompt) - hits[chosen]) * TOKEN_NS))
        held[chosen].update(names)


@pytest.mark.parametrize("text", ["window_s=0", "balance_ratio=0.5", "min_requests=-1"])
def test_settings_out_of_range_are_refused(text):
    with pytest.raises(ConfigError, match="window_s must be above 0"):
        policy_from(f"preble:{text}")
