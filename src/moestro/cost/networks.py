"""Networks as a cost model sees them: the sizes of their products, not the products.

A network is a stack of layer groups, alike within a group: GPT-OSS alternates full attention and a window, DeepSeek-V3
begins with three dense layers. Every named network is its published `config.json`, read by `hf_config`.
"""

from __future__ import annotations

from dataclasses import dataclass


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
