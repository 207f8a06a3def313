import numpy as np
import pytest
from support.routers import decide, request, table

from moestro.routing.policies.peers.cache_aware import Aibrix, CacheAware, LlmdAffinity, LowestTtft

HUNDRED = request(num_prompt_tokens=100)


def test_aibrix_takes_the_best_hit_of_usual_load_and_the_emptier_of_two_alike():
    known = table(num_in_flight=[3, 2, 1, 0])
    assert decide(Aibrix(), known, req=HUNDRED, hit_tokens=[80, 80, 32, 0]).engine == 1


def test_aibrix_takes_the_smallest_batch_when_batches_differ_too_much():
    known = table(num_in_flight=[9, 0])
    assert decide(Aibrix(max_range=8), known, req=HUNDRED, hit_tokens=[96, 0]).engine == 1
    assert decide(Aibrix(max_range=9), known, req=HUNDRED, hit_tokens=[96, 0]).engine == 0


def test_aibrix_leaves_out_a_hit_on_an_engine_beyond_one_deviation():
    known = table(num_in_flight=[7, 1, 1, 0])
    assert decide(Aibrix(), known, req=HUNDRED, hit_tokens=[96, 16, 0, 0]).engine == 1
    alike = decide(Aibrix(), table(num_in_flight=[1, 1]), req=HUNDRED, hit_tokens=[0, 96])
    assert (alike.engine, alike.reason) == (1, "most hits, 96 tokens, with 1 in the batch")


def test_cache_aware_follows_a_match_only_if_it_covers_enough():
    known = table(num_in_flight=[5, 4, 0])
    assert decide(CacheAware(), known, req=HUNDRED, hit_tokens=[64, 64, 0]).engine == 1
    assert decide(CacheAware(), known, req=HUNDRED, hit_tokens=[48, 0, 0]).engine == 2
    assert decide(CacheAware(cache_threshold=0.4), known, req=HUNDRED, hit_tokens=[48, 0, 0]).engine == 0
    half = {"req": request(num_prompt_tokens=96), "hit_tokens": [48, 0, 0]}
    assert decide(CacheAware(cache_threshold=0.5), known, **half).engine == 2, "a match has to exceed the threshold"


def test_cache_aware_gives_up_affinity_when_loads_are_unbalanced():
    hits = [96, 0]
    assert decide(CacheAware(), table(num_in_flight=[40, 8]), req=HUNDRED, hit_tokens=hits).engine == 0
    assert decide(CacheAware(), table(num_in_flight=[41, 8]), req=HUNDRED, hit_tokens=hits).engine == 1
    many = table(num_in_flight=[400, 367])  # more than 32 apart, and not by a tenth
    assert decide(CacheAware(), many, req=HUNDRED, hit_tokens=hits).engine == 0


def test_llm_d_sends_where_the_first_token_is_predicted_first():
    known = table(prefill_tokens=[500, 0], num_in_flight=[1, 9])
    by_tokens = decide(LowestTtft(), known, req=HUNDRED, hit_tokens=[96, 0])
    assert by_tokens.scores.tolist() == pytest.approx([(504 / 15_928) * 1e9, (100 / 15_928) * 1e9])
    slow_batches = LowestTtft(predict_ttft_ns=lambda p_tokens, queued, batch: p_tokens * (1 + batch))
    assert decide(slow_batches, known, req=HUNDRED, hit_tokens=[96, 0]).scores.tolist() == [1008, 1000]


def test_llm_d_affinity_keeps_good_hits_until_they_would_wait_too_long():
    known = table(prefill_tokens=[100_000, 0, 0], context_tokens=[100_000, 0, 10])
    hits = [96, 64, 96]
    policy = LlmdAffinity()
    assert decide(policy, known, req=HUNDRED, hit_tokens=hits).engine == 2
    alone = table(prefill_tokens=[100_000, 0, 0], context_tokens=[100_000, 0, 10])
    assert decide(policy, alone, req=HUNDRED, hit_tokens=[96, 64, 0]).engine == 0
    late = table(prefill_tokens=[400_000, 0, 0], context_tokens=[400_000, 0, 10])
    choice = decide(policy, late, req=HUNDRED, hit_tokens=[96, 64, 0])
    assert (choice.engine, "too long" in choice.reason) == (1, True)
    assert decide(policy, alone, req=HUNDRED, hit_tokens=[64, 64, 0]).engine == 1
    assert np.all(decide(policy, alone, req=HUNDRED).scores == [100_100, 100, 110])
