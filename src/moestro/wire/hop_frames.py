"""Frames of the messages between workers: a header in MessagePack, records and a tensor as they are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from moestro.core.stages import DISPATCH, HOP_RECORD, REPLY, Hop, HopMessage, HopRecords
from moestro.core.views import NUM_CLASSES

Frame = bytes | memoryview
_RECORD_WIDTH = HOP_RECORD.itemsize


class TensorFrames(Protocol):
    """Turns a device's tensors into frames and back.

    Attributes:
        dtype: dtype of the tensors, as in `Hop`; "" where nothing is computed.
    """

    dtype: str

    def pack(self, tensor: Any) -> Frame:
        """Return the bytes of a tensor [rows, hidden size] from the device; they never change later."""
        ...

    def flatten(self, tensor: Any) -> Any:
        """Return the bytes of a tensor as `pack` does, where the tensor is."""
        ...

    def num_bytes(self, num_rows: int) -> int:
        """Size of the frame of `num_rows` rows."""
        ...

    def unpack(self, frame: Any, num_rows: int) -> Any:
        """Return the tensor of a frame, for the device to copy at once. It may keep to the memory of a writable frame.

        Args:
            frame: result of `pack`; or of `flatten`, received by the device.
            num_rows: its rows.

        Raises:
            ValueError: the frame has another size.
        """
        ...


class NoTensors:
    """The frames of a device that computes nothing: messages have no tensor."""

    dtype = ""

    def pack(self, tensor: Any) -> Frame:
        """Implement `TensorFrames.pack`."""
        return b""

    def flatten(self, tensor: Any) -> Any:
        """Raise: there is nothing to send."""
        raise AssertionError("a device that computes nothing has no tensors")

    def num_bytes(self, num_rows: int) -> int:
        """Implement `TensorFrames.num_bytes`."""
        return 0

    def unpack(self, frame: Any, num_rows: int) -> Any:
        """Implement `TensorFrames.unpack`."""
        if len(frame):
            raise ValueError(f"{len(frame)} bytes of tensor where nothing is computed")


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker's process to another worker. The receiver then knows that their link works.

    Attributes:
        src, launch: the sender.
        device: name of its device, by which both ends choose how tensors go.
    """

    src: int
    launch: int
    device: str = "cpu"


class SendAgain(msgspec.Struct, frozen=True, tag=True):
    """Ask a home to send again what the sender owes, because a message was lost."""

    src: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """One value of the rendezvous of a channel for tensors between two processes.

    Attributes:
        src, launch: the sender.
        meeting: number of the channel between the two processes.
        key, value: what the sender stored.
    """

    src: int
    launch: int
    meeting: int
    key: str
    value: bytes


PeerNotice = Hello | SendAgain | Meet


class Announcement(msgspec.Struct, frozen=True, gc=False):
    """Header of a message whose tensor follows on a channel for tensors.

    Attributes:
        hop: header of the message.
        meeting: number of the channel.
        number: how many tensors the sender has sent on the channel before.
        num_bytes: size of the tensor. gloo ends a process that receives more bytes than it expects.
    """

    hop: Hop
    meeting: int
    number: int
    num_bytes: int


class AnnouncedHop(NamedTuple):
    """A message without its tensor, which follows on a channel.

    Attributes:
        announcement: header.
        records: HOP_RECORD[n].
    """

    announcement: Announcement
    records: HopRecords


_encode = msgspec.msgpack.Encoder().encode
_decode_hop = msgspec.msgpack.Decoder(Hop).decode
_decode_announcement = msgspec.msgpack.Decoder(Announcement).decode
_decode_notice = msgspec.msgpack.Decoder(PeerNotice).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class HopLimits:
    """Bounds that a message to a worker keeps.

    Attributes:
        worker: the receiver.
        num_workers, num_layers, num_chosen: sizes of the group and of its network.
        num_slots: experts of the receiver in a layer.
        num_places: tokens that the receiver may have between a gate and the next attention.
        num_remote_places: tokens of others that may be among the receiver's experts.
    """

    worker: int
    num_workers: int
    num_layers: int
    num_chosen: int
    num_slots: int
    num_places: int
    num_remote_places: int

    def check(self, hop: Hop, records: HopRecords) -> None:
        """Check a message, so that no later code reads or writes where it should not.

        Raises:
            ValueError: the message breaks a bound; the text says which.
        """
        if hop.dst != self.worker or not 0 <= hop.src < self.num_workers or hop.src == hop.dst:
            raise ValueError(f"a message from worker {hop.src} to {hop.dst} at worker {self.worker}")
        if not 0 <= hop.layer < self.num_layers or min(hop.epoch, hop.seq, hop.num_rows, hop.credits) < 0:
            raise ValueError(f"a header out of bounds: {hop}")
        row = records["row"]
        if hop.kind == DISPATCH:
            if not 0 < hop.num_rows <= self.num_remote_places:
                raise ValueError(f"{hop.num_rows} remote tokens where {self.num_remote_places} have places")
            _check_below(records["slot"], self.num_slots, "slot")
            _check_below(records["service_class"], NUM_CLASSES, "class")
            steps = row[1:] - row[:-1]
            if not len(row) or row[0] or row[-1] != hop.num_rows - 1 or ((steps != 0) & (steps != 1)).any():
                raise ValueError("the rows of a dispatch are not in order")
        elif hop.kind == REPLY:
            _check_below(records["place"], self.num_places, "place")
            _check_below(row, hop.num_rows, "row")
            if hop.num_rows != len(records):
                raise ValueError(f"{hop.num_rows} contributions for {len(records)} records")
        else:
            raise ValueError(f"a message of kind {hop.kind}")
        _check_below(records["choice"], self.num_chosen, "choice")


def _check_below(values: np.ndarray[tuple[int, ...], np.dtype[Any]], bound: int, name: str) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < bound):
        raise ValueError(f"a {name} outside of 0 to {bound - 1}")


def encode_hop(message: HopMessage, tensors: TensorFrames) -> tuple[Frame, Frame, Frame]:
    """Encode a message as three frames: header, records, tensor."""
    return _encode(message.hop), message.records.data, tensors.pack(message.tensor)


def encode_announced(announced: AnnouncedHop) -> tuple[Frame, Frame]:
    """Encode a message whose tensor follows as two frames: header, records."""
    return _encode(announced.announcement), announced.records.data


def encode_notice(notice: PeerNotice) -> bytes:
    """Encode a message of one frame."""
    return _encode(notice)


def decode_frames(
    frames: Sequence[Frame], tensors: TensorFrames, limits: HopLimits
) -> HopMessage | AnnouncedHop | PeerNotice:
    """Decode a message that one of the encoders made.

    Raises:
        ValueError: the frames are no such message, or break `limits`.
    """
    match frames:
        case [notice]:
            decoded: PeerNotice = _decode_notice(notice)
            return decoded
        case [header, body]:
            announcement = _decode_announcement(header)
            records = _decode_records(announcement.hop, body, tensors, limits)
            if announcement.num_bytes != tensors.num_bytes(announcement.hop.num_rows):
                raise ValueError(f"{announcement.num_bytes} bytes of tensor for {announcement.hop.num_rows} rows")
            return AnnouncedHop(announcement, records)
        case [header, body, tensor]:
            hop = _decode_hop(header)
            records = _decode_records(hop, body, tensors, limits)
            # Read-only, so that it is copied: numbers in the memory of ZeroMQ need not be aligned.
            return HopMessage(hop, records, tensors.unpack(memoryview(tensor).toreadonly(), hop.num_rows))
    raise ValueError(f"a message of {len(frames)} frames")


def _decode_records(hop: Hop, body: Frame, tensors: TensorFrames, limits: HopLimits) -> HopRecords:
    if len(body) % _RECORD_WIDTH:
        raise ValueError(f"records of {len(body)} bytes")
    records = np.frombuffer(body, HOP_RECORD)
    limits.check(hop, records)
    if hop.dtype != tensors.dtype:
        raise ValueError(f"a tensor of {hop.dtype!r} where {tensors.dtype!r} is computed")
    return records
