"""Messages between attention and expert workers: a header, one record a (token, choice), and the rows of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

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
        credits: guest places that a reply gives back.
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
