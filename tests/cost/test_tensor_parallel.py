"""One GPU's share of a network under tensor parallelism."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.cost.gpus import A100
from moestro.cost.hf_config import network_named
from moestro.cost.model import Batch
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tensor_parallel import network_share
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
    with pytest.raises(ConfigError, match=r"mixtral-8x7b: an intermediate size of 14336 is not divisible by 3 GPUs"):
        network_share(MIXTRAL, 3)
