"""What `moestro calibrate --server` reads of a server's `/metrics`."""

from __future__ import annotations

import pytest

from moestro.calibrate.probing.verb import figures_of

VLLM = b"""vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="0",model_name="m"} 20.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 2.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 4096.0
sglang:prompt_tokens_total{model_name="m"} 10.0
sglang:generation_tokens_total{model_name="m"} 5.0
"""


def test_figures_of_vllm():
    found = figures_of(VLLM)
    assert (found.num_running, found.num_waiting, found.kv_usage) == (3, 1, 0.25)
    assert (found.num_tokens, found.num_hit_tokens) == (120, 64)
    assert (found.num_kv_tokens, found.block_size, found.num_engines) == (3200, 32, 1)


def test_figures_of_sglang():
    found = figures_of(SGLANG)
    assert (found.num_running, found.kv_usage, found.num_kv_tokens, found.num_tokens) == (2, 0.5, 4096, 15)
    assert found.block_size is None
    assert found.is_late
    assert not figures_of(VLLM).is_late
    assert not figures_of(b"moestro:num_requests_running 1\n" + SGLANG).is_late


@pytest.mark.parametrize("text", [VLLM + VLLM.replace(b'engine="0"', b'engine="1"')])
def test_engines_behind_one_address_are_counted(text):
    assert figures_of(text).num_engines == 2


@pytest.mark.parametrize("text", [b"", b"<html>", b"go_goroutines 7\n"])
def test_other_pages_have_no_figures(text):
    assert figures_of(text) is None
