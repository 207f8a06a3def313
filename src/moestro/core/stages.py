"""Work in pieces smaller than a forward pass: the items, their results, and the device that does them.

A token in flight has a *row* of the device's for as long as it is in the network: its residual stream. Between the
attention and the end of the experts of one layer it has a *place* besides: what its experts read and have answered.
The executor gives out both; a place is its again when the layer is complete, a row when the unit's result is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.work import BlockMoves, Int32s, StepResult, Units

NUM_PLANS = 2  # that a rank has inside at once: one that is parked, and one that passes it


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """What a device that works in stages offers.

    Attributes:
        is_sparse: of each layer, whether it has routed experts.
        num_experts: physical experts of the layer that has most; 0: a dense network.
        num_chosen: experts that a token visits in a layer; 0: a dense network.
        num_rows, num_places: tokens in the network, and tokens between attention and the end of experts, at once.
    """

    is_sparse: tuple[bool, ...]
    num_experts: int
    num_chosen: int
    num_rows: int
    num_places: int

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""
        return len(self.is_sparse)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """A layer up to and with its gate, for whole units; in layer 0 the embedding comes first. A dense layer: all of it.

    Attributes:
        units: n units. The same object as of an earlier item says that they are the same units.
        rows, places: int32[tokens], of the units' tokens end to end; a dense layer gets no places.
    """

    layer: int
    units: Units
    rows: Int32s
    places: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Expert batches of one layer, one after another; then the layer is completed for tokens that have all of theirs.

    Attributes:
        layer: the layer.
        experts: int32[m], physical experts, distinct, in the order in which they run.
        counts: int32[m], tokens of each, at least 1.
        places: int32[sum of counts], of these tokens, those of the first expert first.
        choices: int32[sum of counts], which of the token's experts this is, in ascending expert id.
        complete_rows, complete_places: int32[c], tokens that lack no other expert once all batches are done: their
            contributions are added in ascending expert id and the layer's output goes to the row.
    """

    layer: int
    experts: Int32s
    counts: Int32s
    places: Int32s
    choices: Int32s
    complete_rows: Int32s
    complete_places: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """All stages of several layers for the same units: what a forward pass does, and as fast, but it can be withdrawn.

    Attributes:
        layer: the first; the units wait for its attention.
        until: the units stop before the attention of this layer; `num_layers`: before the sampler; more: nowhere.
        units: n units, as of `Attention`.
        rows, places: int32[tokens]; a dense network gets no places.
    """

    layer: int
    until: int
    units: Units
    rows: Int32s
    places: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What follows the last layer: logits, next tokens, log probabilities.

    Attributes:
        units: n units.
        rows: int32[tokens].
    """

    units: Units
    rows: Int32s


StageItem = Attention | Experts | Passage | Sample


@dataclass(frozen=True, slots=True, eq=False)
class AttentionDone:
    """Of an `Attention`: int32[tokens, chosen], each token's experts in ascending id; None from a dense layer."""

    topk_ids: Int32s | None


@dataclass(frozen=True, slots=True)
class ExpertsDone:
    """Of an `Experts`: how many of its batches were done. Only if all were, its tokens are complete."""

    num_batches: int


@dataclass(frozen=True, slots=True, eq=False)
class Stopped:
    """Of a `Passage`: where its units stand, because they were to stop there or it was withdrawn.

    Attributes:
        layer: the layer in which they stand.
        topk_ids: None: before its attention; else as `AttentionDone`, and the units are among its experts.
        first_open: the contributions of experts with lower ids are there, those of the others are not.
        expert_counts: int64[layers, experts], tokens that each expert computed; None: a dense network.
    """

    layer: int
    topk_ids: Int32s | None
    first_open: int
    expert_counts: NDArray[np.int64] | None


# Who ends with the sampler answers a StepResult, whose `expert_counts` are those of the item (of a `Sample`: None).
StageResult = AttentionDone | ExpertsDone | Stopped | StepResult


class StagedDevice(Protocol):
    """Does stage items in the order in which they are launched."""

    @property
    def shape(self) -> StageShape:
        """What it offers."""
        ...

    @property
    def works_when_polled(self) -> bool:
        """Whether launched items stand still between polls: then nothing is won by launching early."""
        ...

    def launch(self, item: StageItem, now_ns: int) -> None:
        """Start `item`; may return before it is done."""
        ...

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """As `Device.move_blocks`. Items under way touch no block that is copied."""
        ...

    def poll(self, now_ns: int) -> Sequence[StageResult]:
        """Results that are ready, each exactly once, in launch order.

        Where `ready_at_ns` is never known it works on, or waits for, one piece: an item, or one batch of an `Experts`;
        for a withdrawn item it does nothing more. Elsewhere it never blocks.
        """
        ...

    def withdraw(self, now_ns: int) -> None:
        """Give up what has not begun of all launched `Experts` and `Passage`; their results say how far they came."""
        ...

    def ready_at_ns(self) -> int | None:
        """When the oldest unfinished item will be ready; None: nothing is running, or only the hardware knows."""
        ...
