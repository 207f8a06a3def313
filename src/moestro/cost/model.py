"""What the simulator and the priced device ask of a cost model. Prices are integer nanoseconds."""

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
    """The units of one step as far as they cost anything, one row each; both columns are those of `core.work.Units`.

    A row of one token is a decode (a prompt's last token on its own costs the same), any other a prefill chunk.

    Attributes:
        start: int[n], tokens of the sequence that are in the KV cache already.
        num_tokens: int[n], tokens to compute, at least 1.
        num_other_tokens: tokens that the other ranks of its expert-parallel group compute in the same step, where they
            are not priced with it: an idle rank counts 1.
    """

    start: Ints
    num_tokens: Ints
    num_other_tokens: int = 0


class CostModel(Protocol):
    """Prices steps of one rank."""

    def step_ns(self, batch: Batch) -> int:
        """What one step takes, from its plan to its sampled tokens; `batch` has at least one row."""
        ...

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """What each of the coming `num_steps` steps takes in which every sequence decodes one token.

        Args:
            start: int[n], tokens of each sequence that are in the KV cache before the first step.

        Returns:
            int64[num_steps]; entry i is exactly `step_ns` of a batch that starts at `start + i`.
        """
        ...

    def move_ns(self, num_tokens: int) -> int:
        """What copying the KV of so many tokens between the device and its host's memory takes."""
        ...


class GroupCostModel(CostModel, Protocol):
    """Prices steps of ranks in lock-step: an expert-parallel group, which waits for its slowest in every layer."""

    @property
    def num_ep_ranks(self) -> int:
        """Ranks of the group."""
        ...

    def group_step_ns(self, batches: Sequence[Batch | None]) -> int:
        """What one barrier step takes.

        Args:
            batches: of each rank; None: it idles, and computes one dummy token so that the others can go on. At least
                one does not. Their `num_other_tokens` are not looked at.
        """
        ...

    def group_decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """`decode_steps_ns` of a group: entry i is exactly `group_step_ns` of that step.

        Args:
            starts: int[n], of each rank; empty: it idles.
        """
        ...


class StageCostModel(Protocol):
    """Prices what a flow device runs at a time: one stage of one layer."""

    @property
    def network(self) -> NetworkShape:
        """Whose stages."""
        ...

    @property
    def popularity(self) -> NDArray[np.float64] | None:
        """float64[num_experts], sums to 1: how often tokens choose each expert; None: a dense network."""
        ...

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Attention of `layer` with all that stands between two expert stages: norms, projections, gate."""
        ...

    def expert_ns(self, num_rows: int) -> int:
        """One expert over `num_rows` tokens."""
        ...

    def sample_ns(self, num_sequences: int) -> int:
        """The head, and the choice of a token for each sequence."""
        ...

    def move_ns(self, num_tokens: int) -> int:
        """See `CostModel.move_ns`."""
        ...
