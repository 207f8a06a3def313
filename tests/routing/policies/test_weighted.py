import pytest
from support.routers import decide, request, table

from moestro.errors import ConfigError
from moestro.routing.policies.peers.cache_aware import Bailian, Dynamo
from moestro.routing.registry import ROUTE_POLICIES

HUNDRED = request(num_prompt_tokens=100)


def test_bailian_adds_the_miss_ratio_and_the_relative_batch():
    known = table(num_in_flight=[4, 1, 0])
    choice = decide(Bailian(hit_weight=0.7), known, req=HUNDRED, hit_tokens=[80, 0, 0])
    assert choice.scores.tolist() == pytest.approx([0.7 * 0.2 + 0.3, 0.7 + 0.3 / 4, 0.7])
    assert choice.engine == 0
    assert decide(Bailian(hit_weight=0.2), known, req=HUNDRED, hit_tokens=[80, 0, 0]).engine == 2


def test_miss_ratio_multiplies_the_miss_ratio_and_the_batch():
    choice = decide(ROUTE_POLICIES.make("miss_ratio"), table(num_in_flight=[4, 1]), req=HUNDRED, hit_tokens=[80, 0])
    assert choice.scores.tolist() == pytest.approx([0.2 * 5, 2])


def test_dynamo_adds_blocks_to_prefill_less_those_cached_and_blocks_in_decode():
    known = table(prefill_tokens=[160, 0], context_tokens=[320, 640], num_in_flight=[2, 4])
    of_160 = request(num_prompt_tokens=160)
    choice = decide(Dynamo(), known, req=of_160, hit_tokens=[80, 0])
    assert choice.scores.tolist() == [(320 - 80 + 480) / 16, (160 + 800) / 16]
    weighted = decide(
        Dynamo(prefill_scale=2, overlap_weight=0.5, request_weight=3), known, req=of_160, hit_tokens=[80, 0]
    )
    assert weighted.scores.tolist() == [(2 * 280 + 480) / 16 + 6, (320 + 800) / 16 + 12]


def test_dynamo_credits_a_block_in_host_memory_with_three_quarters():
    known = table(prefill_tokens=[0, 160], context_tokens=[0, 0])
    of_160, hits = request(num_prompt_tokens=160), {"hit_tokens": [80, 80], "host_tokens": [0, 64]}
    choice = decide(Dynamo(overlap_decay=1), known, req=of_160, **hits)
    assert choice.scores.tolist() == [(160 - 80 + 160) / 16, (320 - 16 / 2 - 0.75 * 64 + 160) / 16]
    equal = decide(Dynamo(host_weight=1), table(2), req=of_160, **hits).scores
    assert equal[0] == equal[1]


def test_dynamo_lets_a_hit_count_less_the_more_is_queued_there():
    known = table(prefill_tokens=[160, 0], context_tokens=[0, 0])
    choice = decide(Dynamo(overlap_decay=1), known, req=request(num_prompt_tokens=160), hit_tokens=[80, 80])
    assert choice.scores.tolist() == [(320 - 80 / 2 + 160) / 16, (160 - 80 + 160) / 16]
    both = table(prefill_tokens=[320, 160], context_tokens=[0, 0])  # what both have does not count
    choice = decide(Dynamo(overlap_decay=1), both, req=request(num_prompt_tokens=160), hit_tokens=[80, 80])
    assert choice.scores.tolist() == [(480 - 80 / 2 + 160) / 16, (320 - 80 + 160) / 16]


def test_dynamo_with_a_temperature_draws_by_softmax():
    known = table(context_tokens=[0, 1600])
    cold = [decide(Dynamo(temperature=0.2), known, i).engine for i in range(300)]
    hot = [decide(Dynamo(temperature=100), known, i).engine for i in range(300)]
    assert 0 < cold.count(1) < 15  # 1 in 149 is expected
    assert 110 < hot.count(1) < 190


@pytest.mark.parametrize(
    ("policy", "setting"), [(Bailian, "hit_weight"), (Dynamo, "temperature"), (Dynamo, "host_weight")]
)
def test_a_setting_out_of_range_is_refused(policy, setting):
    with pytest.raises(ConfigError, match=setting):
        policy(**{setting: -1})
