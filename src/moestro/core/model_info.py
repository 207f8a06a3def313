"""Properties of a loaded model, from the rank that loads it to the banner, `/v1/models` and `/metrics`."""

from __future__ import annotations

import msgspec

from moestro.core.request import SamplingDefaults


class CardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Uses of an accelerator's memory, in bytes.

    Attributes:
        total_bytes: memory of the card.
        num_sharing: processes of the server that use the card.
        weight_bytes, other_bytes: weights of one process; libraries and other programs.
        step_bytes, graph_bytes: the most that a step takes while it runs; recorded steps.
        kv_bytes: KV cache of one process.
    """

    total_bytes: int
    num_sharing: int
    weight_bytes: int
    other_bytes: int
    step_bytes: int
    graph_bytes: int
    kv_bytes: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded network and its KV cache, for the scheduler and the API server.

    Attributes:
        model_id: key of the block hashes.
        max_model_len: tokens of the longest sequence that is served.
        vocab_size: token ids are in 0 .. vocab_size - 1.
        eos_token_ids: tokens that end a sequence, ascending.
        sampling_defaults: values for fields that a request does not set.
        block_size: tokens of a KV block.
        num_blocks: KV blocks.
        num_host_blocks: blocks of host memory for KV: of preempted sequences, and below the prefix cache.
        block_bytes: KV of one block in all layers of the rank; 0 without a KV cache.
        host_block_ns: measured time of the copy of such a block to the device. None means that there are none.
        num_parameters: all parameters of the network.
        model_type: the family's name in transformers.
        dtype: of weights and KV, for instance `bfloat16`.
        device: for instance `cpu` or `cuda`.
        num_layers: transformer blocks.
        num_experts: routed experts of a layer; 0 means a dense model.
        num_experts_per_token: experts that each token visits in a layer; 0 means a dense model.
        pace_dilation: factor on the modelled durations of a paced device; 1 without one.
        notes: notes for the operator, one sentence each.
        has_logits: whether a network computes logits; a paced device without arithmetic has none.
        card: memory of the accelerator; None on a CPU and on a paced device.
        is_exact: whether batch and schedule never change tokens, so that another engine can continue an answer.
    """

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    host_block_ns: int | None = None
    num_parameters: int
    model_type: str
    dtype: str
    device: str
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    pace_dilation: float = 1.0
    notes: tuple[str, ...] = ()
    has_logits: bool = True
    card: CardMemory | None = None
    is_exact: bool = False
