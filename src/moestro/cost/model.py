"""The interface of cost models, for the simulator and the priced device. Prices are integer nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.cost.networks import NetworkShape

Ints = NDArray[np.int32] | NDArray[np.int64]
Int64s = NDArray[np.int64]


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The units of one step, as far as they affect its cost, one row each. The columns are those of `core.work.Units`.

    A row of one token is a decode; a prompt's last token alone costs the same. Any other row is a prefill chunk.

    Attributes:
        start: int[n], tokens of the sequence that are already in the KV cache.
        num_tokens: int[n], tokens to compute, at least 1.
        num_other_tokens: tokens that the other ranks of an expert-parallel group compute in the same step, where these
            are priced separately; an idle rank counts 1.
    """

    start: Ints
    num_tokens: Ints
    num_other_tokens: int = 0


class CostModel(Protocol):
    """Prices steps of one rank."""

    def step_ns(self, batch: Batch) -> int:
        """Time of one step, from its plan to its sampled tokens; `batch` has at least one row."""
        ...

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Time of each of the next `num_steps` decode steps, in which every sequence decodes one token.

        Args:
            start: int[n], tokens of each sequence in the KV cache before the first step.

        Returns:
            int64[num_steps]; entry i equals `step_ns` of a batch that starts at `start + i`.
        """
        ...

    def move_ns(self, num_tokens: int) -> int:
        """Time to copy the KV of `num_tokens` tokens between the device and host memory."""
        ...


class GroupCostModel(CostModel, Protocol):
    """Prices steps of ranks in lock-step: an expert-parallel group waits for its slowest rank in every layer."""

    @property
    def num_ep_ranks(self) -> int:
        """Number of ranks in the group."""
        ...

    def group_step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Time of one barrier step.

        Args:
            batches: batch of each rank; None means an idle rank, which computes one dummy token so that the others can
                proceed. At least one rank has a batch. Their `num_other_tokens` are ignored.
        """
        ...

    def group_decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Time of each of the next decode steps of a group: entry i equals `group_step_ns` of that step.

        Args:
            starts: int[n] for each rank; empty means an idle rank.
        """
        ...


class StageCostModel(Protocol):
    """Prices what a flow device runs at once: one stage of one layer."""

    @property
    def network(self) -> NetworkShape:
        """Network whose stages are priced."""
        ...

    @property
    def popularity(self) -> NDArray[np.float64] | None:
        """float64[num_experts], sums to 1: chance that a token chooses each expert; None for a dense network."""
        ...

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Time of one layer between two expert stages: norms, projections, attention, gate."""
        ...

    def expert_ns(self, num_rows: int) -> int:
        """Time of one expert over `num_rows` tokens."""
        ...

    def sample_ns(self, num_sequences: int) -> int:
        """Time of the head and the sampler for `num_sequences` sequences."""
        ...

    def move_ns(self, num_tokens: int) -> int:
        """Implement `CostModel.move_ns`."""
        ...
