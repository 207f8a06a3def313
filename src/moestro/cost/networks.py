"""Networks as a cost model sees them: the sizes of their products, not the products.

A network is a stack of layer groups, alike within a group: GPT-OSS alternates full attention and a window, DeepSeek-V3
begins with three dense layers. Every named network is its published `config.json`. The file of any other decoder can be
read too, if its fields have the usual names.

One GPU's share under tensor parallelism is a separate network, which every cost model can price. Attention is divided
by heads, MLPs and experts by their intermediate size, the vocabulary by rows (Megatron-LM, arXiv 1909.08053).
All-reduces are not part of the share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moestro.errors import ConfigError
from moestro.files.config_fields import EXPERT_KEYS, TOP_K_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention.

    Attributes:
        projections: (outputs, inputs) of each product that every token passes once.
        kv_bytes_per_token: in the pool, of one layer.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values; 1 with latents, which are not divided.
        decode_flops: for each token of context that one new token attends to.
        prefill_flops: the same within a prefill chunk, where keys and values are not compressed.
        expand_flops: in prefill, for each token of context, once a chunk: latents made keys and values again (MLA).
    """

    projections: tuple[tuple[int, int], ...]
    kv_bytes_per_token: int
    num_heads: int
    decode_flops: float
    prefill_flops: float
    expand_flops: float = 0.0
    num_kv_heads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The routed experts of a layer: three products each (gate, up, down)."""

    num_experts: int
    top_k: int
    intermediate_size: int
    bytes_per_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that cost the same.

    Attributes:
        layers: which, from 0.
        dense_size: intermediate size of what every token passes: a dense MLP, or shared experts; 0: nothing.
        has_experts: whether there are routed experts.
        window: tokens that attention looks back at; None: all.
    """

    layers: tuple[int, ...]
    dense_size: int
    has_experts: bool
    window: int | None = None

    @property
    def num_layers(self) -> int:
        """How many they are."""
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """Sizes of one network, by which its steps and memory are priced.

    Attributes:
        name: what messages and reports call it.
        hidden_size, vocab_size: the usual.
        attention: of every layer.
        experts: routed experts, of the groups that have them; None: a dense network.
        groups: its layers.
        bytes_per_weight: of everything but routed experts, embedding and head, which are 2 bytes.
        is_fp8: whether products run on FP8 units, where a GPU has them.
        ties_embeddings: whether embedding and head are one matrix.
    """

    name: str
    hidden_size: int
    vocab_size: int
    attention: AttentionShape
    experts: ExpertShape | None
    groups: tuple[LayerGroup, ...]
    bytes_per_weight: float = 2.0
    is_fp8: bool = False
    ties_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return sum(group.num_layers for group in self.groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all layers; windows do not shorten it, for a block table is the same for all layers."""
        return self.num_layers * self.attention.kv_bytes_per_token

    @property
    def expert_bytes(self) -> float:
        """Weights of one routed expert of one layer; 0: dense."""
        if self.experts is None:
            return 0.0
        return 3 * self.hidden_size * self.experts.intermediate_size * self.experts.bytes_per_weight

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(group.num_layers for group in self.groups if group.has_experts)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted(layer for group in self.groups if group.has_experts for layer in group.layers))

    @property
    def attention_weight_bytes(self) -> float:
        """Weights of an attention worker: all but the routed experts, with gates, shared experts and dense layers."""
        h = self.hidden_size
        attention = sum(rows * columns for rows, columns in self.attention.projections)
        dense = sum(group.num_layers * (attention + 3 * h * group.dense_size) for group in self.groups)
        gates = self.num_moe_layers * (self.experts.num_experts if self.experts else 0) * 2.0 * h
        vocabulary = 2.0 * h * self.vocab_size * (1 if self.ties_embeddings else 2)
        return dense * self.bytes_per_weight + gates + vocabulary

    def slot_weight_bytes(self, num_slots: int) -> float:
        """Weights of `num_slots` routed experts in each layer that has some, as an expert worker holds them."""
        return self.num_moe_layers * num_slots * self.expert_bytes

    def weight_bytes(self, num_ep_ranks: int = 1) -> float:
        """Weights that one of `num_ep_ranks` ranks holds: its share of the routed experts, and all of the rest."""
        num_experts = self.experts.num_experts if self.experts else 0
        return self.attention_weight_bytes + self.slot_weight_bytes(num_experts) / num_ep_ranks


def grouped_query(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    """Attention with `num_kv_heads` heads of keys and values: multi-head, grouped-query, multi-query."""
    return AttentionShape(
        projections=(
            ((num_heads + 2 * num_kv_heads) * head_dim, hidden_size),
            (hidden_size, num_heads * head_dim),
        ),
        kv_bytes_per_token=2 * num_kv_heads * head_dim * 2,
        num_heads=num_heads,
        decode_flops=4.0 * num_heads * head_dim,
        prefill_flops=4.0 * num_heads * head_dim,
        num_kv_heads=num_kv_heads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDims:
    """Sizes of multi-head latent attention, named as in DeepSeek's configs; `q_lora_rank` 0: queries have full rank."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


def latent(hidden_size: int, num_heads: int, dims: LatentDims) -> AttentionShape:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), as engines serve it.

    Decode absorbs the up-projections into queries and outputs: all heads attend to one latent a token, read once, with
    2 (r + rope) + 2 r flops a head. Prefill makes keys and values of the latents again and attends to these.
    """
    rank, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    key_dim = dims.qk_nope_head_dim + rope
    queries, low = num_heads * key_dim, dims.q_lora_rank
    q = ((low, hidden_size), (queries, low)) if low else ((queries, hidden_size),)
    up = num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    return AttentionShape(
        projections=(*q, (rank + rope, hidden_size), (up, rank), (hidden_size, num_heads * dims.v_head_dim)),
        kv_bytes_per_token=(rank + rope) * 2,
        num_heads=num_heads,
        decode_flops=2.0 * num_heads * (2 * rank + rope),
        prefill_flops=2.0 * num_heads * (key_dim + dims.v_head_dim),
        expand_flops=2.0 * rank * up,
    )


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

_DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
_GLM_4_5 = {
    "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 151552,
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
    "qwen3-235b-a22b": {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2-instruct": {
        **_DEEPSEEK_V3, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "first_k_dense_replace": 1, "vocab_size": 163840,
    },
    "glm-4.5": _GLM_4_5,
    "glm-4.6": _GLM_4_5,
    "glm-4.5-air": {
        **_GLM_4_5, "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "first_k_dense_replace": 1,
    },
    "minimax-m2": {
        "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8,
        "vocab_size": 200064, "quantization_config": {"quant_method": "fp8"},
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


def network_share(network: NetworkShape, num_gpus: int) -> NetworkShape:
    """Return what one of `num_gpus` GPUs computes and holds of every layer.

    With fewer heads of keys and values than GPUs, each GPU holds one head, as in vLLM. Compressed keys and values (MLA)
    and their down-projections are on every GPU.

    Args:
        network: the whole network.
        num_gpus: GPUs of the replica.

    Raises:
        ConfigError: the heads or an intermediate size are not divisible by the number of GPUs.
    """
    experts = network.experts
    num_heads = network.attention.num_heads
    if num_heads % num_gpus:
        raise ConfigError(f"{network.name}: {num_heads} attention heads are not divisible by {num_gpus} GPUs")
    sizes = {group.dense_size for group in network.groups} | ({experts.intermediate_size} if experts else set())
    for size in sorted(sizes):
        if size % num_gpus:
            raise ConfigError(f"{network.name}: an intermediate size of {size} is not divisible by {num_gpus} GPUs")
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // num_gpus)
    return replace(
        network,
        name=f"{network.name}/{num_gpus}",
        vocab_size=-(-network.vocab_size // num_gpus),  # engines pad the vocabulary
        attention=_attention_share(network.attention, num_gpus),
        experts=experts,
        groups=tuple(replace(group, dense_size=group.dense_size // num_gpus) for group in network.groups),
    )


def _attention_share(attention: AttentionShape, num_gpus: int) -> AttentionShape:
    projections: tuple[tuple[int, int], ...]
    kv_bytes = attention.kv_bytes_per_token
    if attention.expand_flops:  # latent attention: queries, latent, up, out
        *lows, (query, low), latent, (up, rank), (hidden, values) = attention.projections
        projections = (*lows, (query // num_gpus, low), latent, (up // num_gpus, rank), (hidden, values // num_gpus))
    else:
        (rows, hidden), (_, query) = attention.projections
        num_kv_heads = attention.num_kv_heads
        kv_share = max(num_gpus, num_kv_heads) // num_gpus / num_kv_heads  # of all heads; at least one head
        kv_rows = round((rows - query) * kv_share)
        projections = ((query // num_gpus + kv_rows, hidden), (hidden, query // num_gpus))
        kv_bytes = round(kv_bytes * kv_share)
    return AttentionShape(
        projections=projections,
        kv_bytes_per_token=kv_bytes,
        num_heads=attention.num_heads // num_gpus,
        decode_flops=attention.decode_flops / num_gpus,
        prefill_flops=attention.prefill_flops / num_gpus,
        expand_flops=attention.expand_flops / num_gpus,
        num_kv_heads=max(attention.num_kv_heads // num_gpus, 1),
    )
