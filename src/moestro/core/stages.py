"""Work items smaller than a forward pass, their results, the device that computes them, and messages of tokens.

A token in flight occupies a *row* of the device while it is in the network: its residual stream. From a layer's gate
until the next attention has added the experts' contributions, it also occupies a *place*: the input of its experts, and
one slot for each contribution. The executor allocates both. *Remote places* hold the inputs and contributions of tokens
whose rows are on other devices; their numbers follow those of the device's own places. The messages that bring them
have a header, one record a (token, choice), and the rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.work import BlockMoves, Int32s, StepResult, Units

NUM_PLANS = 2  # plans that a rank has in flight at once: a parked one, and one that passes it


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Sizes of a device that works in stages.

    Attributes:
        is_sparse: whether each layer has routed experts.
        num_experts: largest number of the device's physical experts (slots) in a layer; 0 for a dense network, and for
            a device without experts.
        num_chosen: experts that a token visits in a layer; 0 for a dense network.
        num_rows: tokens that may be in the network at once; 0 for a device without attention.
        num_places: tokens that may be between a gate and the next attention at once.
        num_remote_places: tokens of other devices that may be among this device's experts at once.
    """

    is_sparse: tuple[bool, ...]
    num_experts: int
    num_chosen: int
    num_rows: int
    num_places: int
    num_remote_places: int = 0

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return len(self.is_sparse)


class Merges(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens of an item whose experts' contributions are added before the item begins.

    Contributions are added in ascending logical expert id in float32 (float64 in float64). A token's new place may be
    the one that is merged.

    Attributes:
        rows, places: int32[m], a subset of the item's tokens in their order, usually all or none of them.
    """

    rows: Int32s
    places: Int32s

    def __len__(self) -> int:
        return len(self.rows)


class Attention(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Item: a layer up to and including its gate, for whole units.

    In layer 0 the embedding comes first. The layer before is completed first for tokens that have contributions of its
    experts. A dense layer is computed completely.

    Attributes:
        layer: the layer.
        units: n units. The same object as in an earlier item means the same units.
        rows, places: int32[tokens], of the units' concatenated tokens; a dense layer gets no places.
        merges: tokens whose place holds all contributions of layer `layer - 1`.
    """

    layer: int
    units: Units
    rows: Int32s
    places: Int32s
    merges: Merges


class Experts(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Item: expert batches of one layer, one after another.

    Attributes:
        layer: the layer.
        experts: int32[m], distinct physical experts (slots) in the order in which they run.
        counts: int32[m], tokens of each expert, at least 1.
        places: int32[sum of counts], own or remote places of these tokens, ordered by expert.
        choices: int32[sum of counts], index of the expert among the token's experts, in ascending logical expert id.
    """

    layer: int
    experts: Int32s
    counts: Int32s
    places: Int32s
    choices: Int32s


class Passage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Item: all stages of several layers for the same units, as fast as a forward pass, but it can be withdrawn.

    Attributes:
        layer: the first layer, for whose attention the units wait.
        until: the layer before whose attention the units stop. `num_layers` means before the sampler, and a larger
            number means no stop.
        units: n units, as in `Attention`.
        rows, places: int32[tokens], as in `Attention`; a dense network gets no places.
        merges: as in `Attention`.
    """

    layer: int
    until: int
    units: Units
    rows: Int32s
    places: Int32s
    merges: Merges


class Sample(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Item: the stage after the last layer, with logits, next tokens and log probabilities.

    Attributes:
        units: n units.
        rows: int32[tokens], of the units' concatenated tokens.
        merges: tokens whose place holds all contributions of the last layer.
    """

    units: Units
    rows: Int32s
    merges: Merges


class Merge(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Item: the end of a layer alone, which frees the places of units that wait for the next attention.

    Attributes:
        layer: the layer that ends.
        merges: tokens whose place holds all contributions of the layer.
    """

    layer: int
    merges: Merges


StageItem = Attention | Experts | Merge | Passage | Sample


class AttentionDone(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Result of an `Attention`.

    Attributes:
        topk_ids: int32[tokens, chosen], each token's logical experts in ascending id. None for a dense layer.
    """

    topk_ids: Int32s | None


class ExpertsDone(msgspec.Struct, frozen=True, gc=False):
    """Result of an `Experts`.

    Attributes:
        num_batches: batches that were done, in the order of the item; fewer than all only after a withdrawal.
    """

    num_batches: int


class Merged(msgspec.Struct, frozen=True, gc=False):
    """Result of a `Merge`."""


class Stopped(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Result of a `Passage` that stopped where it should, or was withdrawn.

    Attributes:
        layer: the layer in which the units are now.
        topk_ids: as in `AttentionDone`; the units are among the layer's experts, with their state in their places. None
            means that the units are before the layer's attention, with no contribution left to add.
        first_open: experts with lower ids have contributed, the others have not.
        expert_counts: int64[layers, experts], tokens that each expert computed. None for a dense network.
    """

    layer: int
    topk_ids: Int32s | None
    first_open: int
    expert_counts: NDArray[np.int64] | None


# An item that reaches the sampler returns a `StepResult`. Its `expert_counts` are those of the item, None for `Sample`.
StageResult = AttentionDone | ExpertsDone | Merged | Stopped | StepResult


class StagedDevice(Protocol):
    """Computes stage items in the order in which they are launched."""

    @property
    def shape(self) -> StageShape:
        """The device's sizes."""
        ...

    @property
    def works_when_polled(self) -> bool:
        """Whether launched items make progress only during polls, so that launching early gains nothing."""
        ...

    def launch(self, item: StageItem, now_ns: int) -> None:
        """Start `item`; the call may return before it is done."""
        ...

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Copy KV, as `Device.move_blocks`. Items in flight touch no copied block."""
        ...

    def read_inputs(self, places: Int32s) -> Any:
        """[n, hidden size], inputs of the experts at own places, for a message. None if nothing is computed."""
        ...

    def store_inputs(self, places: Int32s, inputs: Any) -> None:
        """Store what a message brought as inputs at remote places. `inputs`: as from `read_inputs`."""
        ...

    def read_contributions(self, places: Int32s, choices: Int32s) -> Any:
        """[n, hidden size], unweighted contributions to remote tokens, for a message. None if nothing is computed."""
        ...

    def store_contributions(self, places: Int32s, choices: Int32s, contributions: Any) -> None:
        """Store what a message brought as contributions at own places; as from `read_contributions`."""
        ...

    def poll(self, now_ns: int) -> Sequence[StageResult]:
        """Take the ready results, each exactly once, in launch order.

        A device whose `ready_at_ns` is never known computes or awaits one piece in this call: an item, or one batch of
        an `Experts`. It does nothing more for a withdrawn item. Other devices never block.
        """
        ...

    def withdraw(self, now_ns: int) -> None:
        """Drop the parts of launched `Experts` and `Passage` items that have not begun; results say what was done."""
        ...

    def ready_at_ns(self) -> int | None:
        """Time at which the oldest unfinished item is ready. None means nothing runs, or only the hardware knows."""
        ...


# One record for each (token, choice).
#   row: index of its vector in the message's tensor; in a reply, its own index.
#   place, generation: the home's place, and how often that place was given out; a reply echoes both.
#   choice: index of the expert among the token's experts, in ascending logical id.
#   service_class: LS or BE.
#   slot: the receiver's slot of the expert (dispatch), or the sender's (reply).
#   waited_us: for how long the token was passed over so far.
HOP_RECORD = np.dtype(
    [
        ("row", "<i4"),
        ("place", "<i4"),
        ("generation", "<u4"),
        ("choice", "u1"),
        ("service_class", "u1"),
        ("slot", "<i2"),
        ("waited_us", "<u4"),
    ]
)
HopRecords = NDArray[np.void]

DISPATCH, REPLY = 0, 1


def join_records(parts: Sequence[HopRecords]) -> HopRecords:
    """Concatenate contiguous records; the result is read-only.

    The bytes are joined, because NumPy compares all field names of the parts, which takes 30 us.
    """
    if len(parts) == 1:
        return parts[0]
    # Arrays are buffers, which NumPy's annotations say from Python 3.12 on.
    joined: HopRecords = np.frombuffer(b"".join(cast(Sequence[bytes], parts)), HOP_RECORD)
    return joined


class Hop(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Header of a message.

    Attributes:
        kind: DISPATCH (inputs, from the home to an expert worker) or REPLY (unweighted contributions, back).
        src, dst: workers.
        epoch: counts how often the home gave up what was under way to this expert worker; a reply echoes it.
        seq: number of the message on its channel and in its epoch, from 0.
        layer: layer of the experts.
        num_rows: rows of the tensor: one for each token (dispatch), or for each record (reply).
        dtype: dtype of the tensor as NumPy names it; "bfloat16" is named although NumPy has none.
        table_version: version of the expert table that the dispatcher used; 0 in a reply, which may answer several.
        credits: remote places that a reply gives back.
        depths: pairs that wait on the sender in each slot, summed over all layers; empty in a dispatch.
        num_taken: dispatches of the receiver in this epoch that `depths` includes; 0 in a dispatch.
    """

    kind: int
    src: int
    dst: int
    epoch: int
    seq: int
    layer: int
    num_rows: int
    dtype: str = ""
    table_version: int = 0
    credits: int = 0
    depths: tuple[int, ...] = ()
    num_taken: int = 0


class HopMessage(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A message between workers.

    Attributes:
        hop: header.
        records: HOP_RECORD[n].
        tensor: [rows, hidden size], in whatever form the devices give it; None where no device computes.
    """

    hop: Hop
    records: HopRecords
    tensor: Any = None
