"""Network shapes from a Hugging Face `config.json`, for any decoder with the usual field names; and named networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moestro.cost.networks import (
    AttentionShape,
    ExpertShape,
    LatentDims,
    LayerGroup,
    NetworkShape,
    grouped_query,
    latent,
)
from moestro.errors import ConfigError
from moestro.files.config_fields import EXPERT_KEYS, TOP_K_KEYS

Config = Mapping[str, Any]

MXFP4_BYTES = 4.25 / 8  # four bits a weight, and eight bits for each 32 weights (OCP microscaling formats, v1.0)

_MIXTRAL = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip
_GPT_OSS = {
    "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip

_MIXTRAL_MQA = {**_MIXTRAL, "num_key_value_heads": 1}

# Sizes from each config.json on the Hugging Face hub. The multi-query Mixtrals are AMoE's (section 5): Mixtral with one
# head of keys and values, with top-2 or top-1 routing, and with 16 experts, which stand for Llama 4.
CONFIGS: dict[str, Config] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936,
    },
    "mixtral-8x7b": _MIXTRAL,
    "mixtral-8x7b-mqa": _MIXTRAL_MQA,
    "mixtral-8x7b-mqa-top1": {**_MIXTRAL_MQA, "num_experts_per_tok": 1},
    "mixtral-16x7b-mqa-top1": {**_MIXTRAL_MQA, "num_local_experts": 16, "num_experts_per_tok": 1},
    "deepseek-v3": {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8"},
    },
    "gpt-oss-20b": {
        **_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": {
        **_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "qwen2-7b": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064,
    },
}  # fmt: skip


def known_name(name: str) -> str | None:
    """Return the name in CONFIGS of a network or a repository (OWNER/NAME), in any case; None means unknown."""
    last = name.lower().rpartition("/")[2]
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return last if last in CONFIGS and not is_path else None


def network_named(name: str) -> NetworkShape:
    """Look up a network by name, in any case, or by the name of its repository on the Hugging Face hub.

    Raises:
        ConfigError: the name is unknown.
    """
    known = known_name(name)
    if known is None:
        raise ConfigError(
            f"no sizes for network {name!r}; known: {', '.join(CONFIGS)}. Any other needs its config.json."
        )
    return network_from_config(known, CONFIGS[known])


def network_from_config(name: str, config: Config) -> NetworkShape:
    """Read the sizes from `config`, a parsed config.json.

    Args:
        name: name in messages and reports.
        config: config of a decoder with grouped-query or latent attention, dense or with routed experts.

    Raises:
        ConfigError: a size is missing; the text names it.
    """
    config = config.get("text_config") or config
    expert_weight, other_weight, is_fp8 = _weight_bytes(config)
    num_experts = _first(config, EXPERT_KEYS)
    experts = None
    if num_experts:
        experts = ExpertShape(
            num_experts=num_experts,
            top_k=_first(config, TOP_K_KEYS) or _missing(name, TOP_K_KEYS[0]),
            intermediate_size=config.get("moe_intermediate_size") or _size(name, config, "intermediate_size"),
            bytes_per_weight=expert_weight,
        )
    return NetworkShape(
        name=name,
        hidden_size=_size(name, config, "hidden_size"),
        vocab_size=_size(name, config, "vocab_size"),
        attention=_attention(name, config),
        experts=experts,
        groups=_groups(name, config, experts),
        bytes_per_weight=other_weight,
        is_fp8=is_fp8,
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _first(config: Config, keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if config.get(key)), None)


def _size(name: str, config: Config, key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else _missing(name, key)


def _missing(name: str, key: str) -> int:
    raise ConfigError(f"{name}: the cost model needs {key!r}, a positive integer, in config.json")


def _weight_bytes(config: Config) -> tuple[float, float, bool]:
    """Bytes of a routed expert's weight, bytes of any other weight, and whether products run in FP8."""
    quantised = config.get("quantization_config") or {}
    method, bits = quantised.get("quant_method"), quantised.get("bits")
    if method == "mxfp4":
        return MXFP4_BYTES, 2.0, False  # experts only; computed in bf16
    if method == "fp8":
        return 1.0, 1.0, True
    if bits:
        return bits / 8, bits / 8, False  # weights only: unpacked, then computed in bf16
    return 2.0, 2.0, False


def _attention(name: str, config: Config) -> AttentionShape:
    hidden_size, num_heads = _size(name, config, "hidden_size"), _size(name, config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        dims = LatentDims(
            q_lora_rank=config.get("q_lora_rank") or 0,
            kv_lora_rank=_size(name, config, "kv_lora_rank"),
            qk_nope_head_dim=_size(name, config, "qk_nope_head_dim"),
            qk_rope_head_dim=_size(name, config, "qk_rope_head_dim"),
            v_head_dim=_size(name, config, "v_head_dim"),
        )
        return latent(hidden_size, num_heads, dims)
    head_dim = config.get("head_dim") or hidden_size // num_heads
    return grouped_query(hidden_size, num_heads, config.get("num_key_value_heads") or num_heads, head_dim)


def _groups(name: str, config: Config, experts: ExpertShape | None) -> tuple[LayerGroup, ...]:
    """Group layers that are alike, in order of each group's first layer."""
    num_layers = _size(name, config, "num_hidden_layers")
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    shared = config.get("shared_expert_intermediate_size") or (
        (config.get("n_shared_experts") or 0) * (experts.intermediate_size if experts else 0)
    )
    num_dense_first = config.get("first_k_dense_replace") or 0
    sparse_step, dense_layers = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    groups: dict[tuple[int, bool, int | None], list[int]] = {}
    for layer in range(num_layers):
        has_experts = (
            experts is not None
            and layer >= num_dense_first
            and layer not in dense_layers
            and (layer + 1) % sparse_step == 0
        )
        window = config.get("sliding_window") if kinds[layer] == "sliding_attention" else None
        dense_size = shared if has_experts else _size(name, config, "intermediate_size")
        groups.setdefault((dense_size, has_experts, window), []).append(layer)
    return tuple(
        LayerGroup(layers=tuple(layers), dense_size=dense, has_experts=has, window=window)
        for (dense, has, window), layers in groups.items()
    )
