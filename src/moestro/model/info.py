"""What is known of a network once it is loaded: plain values that leave the room. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.core.request import SamplingDefaults


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedInfo:
    """A loaded network and its KV cache, for the scheduler and the front door.

    Attributes:
        model_type: the family's name in transformers.
        dtype: of weights and KV, for instance `bfloat16`.
        device: `cpu` or `cuda`.
        max_model_len: tokens of the longest sequence that is served.
        vocab_size: token ids are in 0 .. vocab_size - 1.
        eos_token_ids: tokens that end a sequence, ascending.
        sampling_defaults: what holds where a client says nothing.
        num_blocks, block_size: the KV cache.
        num_host_blocks: of host memory for the KV of preempted sequences.
        num_layers: transformer blocks.
        num_experts: routed experts of a layer; 0: a dense model.
        num_experts_per_token: how many of them a token visits; 0: a dense model.
        num_parameters: in all.
        notes: what the operator should know, one sentence each.
    """

    model_type: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    num_blocks: int
    block_size: int
    num_host_blocks: int
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    num_parameters: int
    notes: tuple[str, ...] = ()
