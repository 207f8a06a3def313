"""One GPU's share of a network under tensor parallelism."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.cost.gpus import A100
from moestro.cost.links import NVSWITCH_A100, all_reduce
from moestro.cost.model import Batch
from moestro.cost.networks import CONFIGS, network_from_config, network_named, network_share
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.errors import ConfigError

MIXTRAL, MQA, DEEPSEEK = (network_named(name) for name in ("mixtral-8x7b", "mixtral-8x7b-mqa", "deepseek-v3"))


@pytest.mark.parametrize("network", [MIXTRAL, MQA, DEEPSEEK])
@pytest.mark.parametrize("num_gpus", [2, 8])
def test_shares_hold_the_whole_and_the_parts_that_every_gpu_needs(network, num_gpus):
    share = network_share(network, num_gpus)
    kept_twice = num_gpus * share.weight_bytes() / network.weight_bytes()
    assert 1 <= kept_twice < 1.03
    assert share.expert_bytes * num_gpus == network.expert_bytes


def test_heads_of_keys_and_values_are_divided_until_each_gpu_has_one():
    assert network_share(MIXTRAL, 4).kv_bytes_per_token * 4 == MIXTRAL.kv_bytes_per_token
    assert network_share(MIXTRAL, 16).kv_bytes_per_token * 8 == MIXTRAL.kv_bytes_per_token
    assert network_share(MQA, 8).kv_bytes_per_token == MQA.kv_bytes_per_token
    assert network_share(DEEPSEEK, 8).kv_bytes_per_token == DEEPSEEK.kv_bytes_per_token


def test_one_gpu_has_the_network_itself():
    share = network_share(DEEPSEEK, 1)
    assert (share.attention, share.experts, share.groups) == (DEEPSEEK.attention, DEEPSEEK.experts, DEEPSEEK.groups)


def test_a_share_is_faster_than_the_whole_but_not_by_the_number_of_gpus():
    whole, share = (Roofline(RooflineSettings(network=n, gpu=A100)) for n in (MIXTRAL, network_share(MIXTRAL, 4)))
    batch = Batch(np.full(64, 1000, np.int32), np.ones(64, np.int32))
    for stage in (lambda cost: cost.attention_ns(0, batch), lambda cost: cost.expert_ns(64), lambda c: c.sample_ns(64)):
        assert 1 < stage(whole) / stage(share) < 4


def test_a_size_that_cannot_be_divided_is_named():
    with pytest.raises(ConfigError, match=r"mixtral-8x7b: 32 attention heads are not divisible by 3 GPUs"):
        network_share(MIXTRAL, 3)
    odd = network_from_config("odd", {**CONFIGS["mixtral-8x7b"], "intermediate_size": 8601})
    with pytest.raises(ConfigError, match=r"odd: an intermediate size of 8601 is not divisible by 2 GPUs"):
        network_share(odd, 2)


@pytest.mark.parametrize(("num_ranks", "num_reduces"), [(1, 2), (4, 1)])
@pytest.mark.parametrize(("start", "new"), [(500, 1), (0, 300)])
def test_a_step_has_the_all_reduces_of_its_layers_and_no_other_time(num_ranks, num_reduces, start, new):
    """Between ranks that share experts, the way back from the experts replaces the second all-reduce of a layer."""
    reduced = all_reduce(NVSWITCH_A100, MIXTRAL, 2)
    share = network_share(MIXTRAL, 2)
    alone, together = (
        Roofline(RooflineSettings(network=share, gpu=A100, num_ep_ranks=num_ranks, all_reduce=each))
        for each in (None, reduced)
    )
    batch = Batch(np.full(8, start, np.int64), np.full(8, new, np.int64))
    added = together.group_step_ns([batch] * num_ranks) - alone.group_step_ns([batch] * num_ranks)
    assert added == num_reduces * MIXTRAL.num_layers * reduced.all_reduce_ns(8 * new)


def test_coming_steps_of_a_tensor_parallel_engine_are_priced_as_single_ones():
    reduced = all_reduce(NVSWITCH_A100, MIXTRAL, 4)
    cost = Roofline(RooflineSettings(network=network_share(MIXTRAL, 4), gpu=A100, all_reduce=reduced))
    start = np.array([10, 700, 3000])
    single = [cost.step_ns(Batch(start + step, np.ones(3, np.int64))) for step in range(5)]
    assert cost.decode_steps_ns(start, 5).tolist() == single
