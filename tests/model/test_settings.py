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
        ({"max_model_len": 0}, "--max-model-len must be at least 1, got 0"),
        ({"block_size": 0}, "--block-size must be at least 1, got 0"),
        ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes must be at least 1, got 0"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override must be at least 1, got 0"),
        ({"max_parked_bytes": -1}, "--max-parked-bytes must be at least 1, got -1"),
        ({"kv_offloading_size": -1.0}, "--kv-offloading-size must be at least 0, got -1"),
        ({"seed": -1}, "--seed must be between 0 and 9223372036854775807, got -1"),
        ({"gate_override": "hot"}, "--gate-override 'hot' is unknown"),
    ],
)
def test_an_impossible_setting_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelSettings(**{"model": "somewhere", **changes})


def test_a_model_alone_is_enough():
    assert ModelSettings(model="somewhere").dtype == "auto"
