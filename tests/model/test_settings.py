"""Settings are checked where they enter: what was given, what is allowed, what to do."""

from __future__ import annotations

import pytest

from moestro.errors import ConfigError
from moestro.model.settings import ModelSettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model is empty"),
        ({"dtype": "int8"}, "--dtype 'int8' is unknown: give one of auto, float32"),
        ({"device": "tpu"}, "--device 'tpu' is unknown"),
        ({"load_format": "gguf"}, "--load-format 'gguf' is unknown"),
        ({"generation_config": "mine"}, "--generation-config 'mine' is unknown: give one of auto, vllm"),
        ({"max_model_len": 0}, "--max-model-len 0 is too small"),
        ({"block_size": 0}, "--block-size 0 is too small"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes 0 is too small"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override 0 is too small"),
        ({"kv_offloading_size": -1.0}, "--kv-offloading-size -1 is no size: give GiB"),
        ({"seed": -1}, "--seed -1 is out of range"),
        ({"gate_override": "hot"}, "--gate-override 'hot' is unknown"),
    ],
)
def test_an_impossible_setting_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelSettings(**{"model": "somewhere", **changes})


def test_a_model_alone_is_enough():
    assert ModelSettings(model="somewhere").dtype == "auto"
