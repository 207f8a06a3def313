"""Tiny random checkpoints of every tested family, and what it takes to run one.

Matrices have a standard deviation of 0.15, sinks, biases and corrections are not zero: with transformers' own 0.02 a
network of this size hardly notices when all of its experts are missing.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moestro.model.load import load_network, read_config
from moestro.model.network import Network
from moestro.model.settings import ModelSettings

VOCAB = 101
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MLA = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "original_max_position_embeddings": 24,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
# Name -> (model_type, what differs from _SHAPE).
FAMILIES: dict[str, tuple[str, dict]] = {
    "mixtral": ("mixtral", {"intermediate_size": 40, "num_local_experts": 6}),
    "mixtral-window": ("mixtral", {"intermediate_size": 40, "num_local_experts": 6, "sliding_window": 7}),
    "qwen2-window": (
        "qwen2",
        {"intermediate_size": 48, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3_moe-window": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("olmoe", {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    ),
    "deepseek_v2-lite": ("deepseek_v2", {**_MLA, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_MLA, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 8,
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "use_qk_norm": True,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "phimoe": (
        "phimoe",
        {
            "intermediate_size": 24,
            "num_local_experts": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": LONG_ROPE,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 8, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "intermediate_size": 40,
            "moe_intermediate_size": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "use_bias": True,
        },
    ),
    "qwen2": ("qwen2", {"intermediate_size": 48}),
    "llama": ("llama", {"intermediate_size": 48, "attention_bias": True}),
}
SPARSE = [name for name in FAMILIES if name not in ("qwen2", "qwen2-window", "llama")]  # families with experts


def make_config(name: str, **changes: object):
    """transformers' config of a family of `FAMILIES`, or of any model type."""
    model_type, own = FAMILIES.get(name, (name, {}))
    return AutoConfig.for_model(model_type, **deepcopy({**_SHAPE, **own, **changes}))  # transformers edits what it gets


def save_checkpoint(directory: Path, config, seed: int = 0) -> Path:
    """Random float32 weights of `config`'s shapes, saved as safetensors."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "inv_freq" in name or not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            norm = tensor.dim() == 1 and "norm" in name
            tensor.copy_(1 + 0.2 * noise if norm else 0.15 * noise)
    model.save_pretrained(directory)
    return directory


def settings_of(directory: Path, **changes: object) -> ModelSettings:
    """Settings that load `directory` in float32 on the CPU, with blocks of 4 tokens."""
    given = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 96}
    return ModelSettings(model=str(directory), **{**given, **changes})


def load(directory: Path, **changes: object) -> Network:
    """The checkpoint on our functions."""
    return load_settings(settings_of(directory, **changes))


def load_settings(settings: ModelSettings) -> Network:
    """The checkpoint that the settings name, on our functions."""
    return load_network(settings, read_config(settings))[0]


@lru_cache(maxsize=64)
def load_oracle(directory: Path, dtype: torch.dtype = torch.float32, attention: str = "eager"):
    """The checkpoint on transformers' own functions; tests share it and change nothing of it."""
    with torch.inference_mode(mode=False):  # other tests may read it in another mode
        oracle = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
        )
    return oracle.eval().requires_grad_(requires_grad=False)
