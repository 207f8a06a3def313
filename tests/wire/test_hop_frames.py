"""Frames of messages between workers: what is sent arrives, and garbage is distinguished from messages."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from moestro.core.stages import DISPATCH, HOP_RECORD, REPLY, Hop, HopMessage
from moestro.wire.hop_frames import (
    AnnouncedHop,
    Announcement,
    Hello,
    HopLimits,
    Meet,
    NoTensors,
    SendAgain,
    decode_frames,
    encode_announced,
    encode_hop,
    encode_notice,
)

LIMITS = HopLimits(worker=2, num_workers=4, num_layers=3, num_chosen=2, num_slots=4, num_places=16, num_remote_places=8)


class Numbers:
    """Tensors of two float32 a row."""

    dtype = "float32"

    def pack(self, tensor):
        return tensor.data.cast("B")

    def num_bytes(self, num_rows):
        return 8 * num_rows

    def unpack(self, frame, num_rows):
        assert memoryview(frame).readonly  # so that a device copies it
        return np.frombuffer(frame, np.float32).reshape(num_rows, 2)


def dispatch(num_rows=3, **changes) -> HopMessage:
    records = np.zeros(2 * num_rows, HOP_RECORD)
    records["row"] = np.arange(2 * num_rows) // 2
    records["place"] = records["row"] + 5
    records["choice"] = np.arange(2 * num_rows) % 2
    records["slot"] = records["choice"] + 2
    fields = {"kind": DISPATCH, "src": 0, "dst": 2, "epoch": 1 << 32, "seq": 7, "layer": 1, "num_rows": num_rows}
    return HopMessage(Hop(**(fields | {"dtype": "float32"} | changes)), records, np.ones((num_rows, 2), np.float32))


def reply() -> HopMessage:
    records = np.zeros(2, HOP_RECORD)
    records["row"], records["place"] = [0, 1], [3, 15]
    hop = Hop(kind=REPLY, src=1, dst=2, epoch=0, seq=0, layer=0, num_rows=2, dtype="float32", depths=(3, 0, 1))
    return HopMessage(hop, records, np.arange(4, dtype=np.float32).reshape(2, 2))


def frames_of(message) -> list[bytes]:
    return [bytes(frame) for frame in encode_hop(message, Numbers())]


def decoded(frames):
    return decode_frames([memoryview(frame) for frame in frames], Numbers(), LIMITS)


@pytest.mark.parametrize("message", [dispatch(), dispatch(1), reply()])
def test_a_message_arrives_as_it_was_sent(message):
    arrived = decoded(frames_of(message))
    assert arrived.hop == message.hop
    assert (arrived.records == message.records).all()
    assert (arrived.tensor == message.tensor).all()


def announced_frames(message, num_bytes: int) -> list[bytes]:
    announced = AnnouncedHop(Announcement(message.hop, 3, 7, num_bytes), message.records)
    return [bytes(frame) for frame in encode_announced(announced)]


@pytest.mark.parametrize("message", [dispatch(), reply()])
def test_an_announcement_arrives_as_it_was_sent(message):
    announcement, records = decoded(announced_frames(message, 8 * message.hop.num_rows))
    assert announcement == Announcement(message.hop, 3, 7, 8 * message.hop.num_rows)
    assert (records == message.records).all()


def test_an_announcement_of_another_size_or_out_of_bounds_is_refused():
    with pytest.raises(ValueError, match="9 bytes of tensor for 3 rows"):
        decoded(announced_frames(dispatch(), 9))
    with pytest.raises(ValueError, match="at worker 2"):
        decoded(announced_frames(dispatch(dst=1), 24))
    huge = reply()
    huge = msgspec.structs.replace(huge, hop=msgspec.structs.replace(huge.hop, num_rows=1 << 40))
    with pytest.raises(ValueError, match="contributions for 2 records"):
        decoded(announced_frames(huge, 8 << 40))


@pytest.mark.parametrize("notice", [Hello(3, 1), SendAgain(0), Meet(1, 2, 0, "0/1", b"address")])
def test_a_notice_arrives_as_it_was_sent(notice):
    assert decoded([encode_notice(notice)]) == notice


def test_a_message_without_a_tensor_has_an_empty_frame():
    message = msgspec.structs.replace(dispatch(dtype=""), tensor=None)
    frames = [bytes(frame) for frame in encode_hop(message, NoTensors())]
    assert frames[2] == b""
    assert decode_frames(frames, NoTensors(), LIMITS).tensor is None
    with pytest.raises(ValueError, match="nothing is computed"):
        decode_frames([*frames[:2], b"1234"], NoTensors(), LIMITS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dst": 1}, "at worker 2"),
        ({"src": 2}, "at worker 2"),
        ({"src": 4}, "at worker 2"),
        ({"layer": 3}, "out of bounds"),
        ({"layer": -1}, "out of bounds"),
        ({"seq": -1}, "out of bounds"),
        ({"credits": -1}, "out of bounds"),
        ({"num_rows": 9}, "9 remote tokens"),
        ({"num_rows": 4}, "not in order"),
        ({"kind": 2}, "kind 2"),
        ({"dtype": "bfloat16"}, "tensor of 'bfloat16'"),
    ],
)
def test_a_header_that_breaks_a_bound_is_refused(changes, text):
    message = dispatch()
    message = msgspec.structs.replace(message, hop=msgspec.structs.replace(message.hop, **changes))
    with pytest.raises(ValueError, match=text):
        decoded(frames_of(message))


@pytest.mark.parametrize(
    ("field", "value"), [("slot", 4), ("slot", -1), ("choice", 2), ("service_class", 2), ("row", -1), ("row", 2)]
)
def test_a_record_of_a_dispatch_that_breaks_a_bound_is_refused(field, value):
    message = dispatch()
    message.records[field][0] = value
    with pytest.raises(ValueError, match=r"outside|not in order"):
        decoded(frames_of(message))


@pytest.mark.parametrize(("field", "value"), [("place", 16), ("place", -1), ("choice", 2), ("row", 2)])
def test_a_record_of_a_reply_that_breaks_a_bound_is_refused(field, value):
    message = reply()
    message.records[field][0] = value
    with pytest.raises(ValueError, match="outside"):
        decoded(frames_of(message))


def test_garbage_is_refused_and_never_breaks_a_bound():
    """Random changes of bytes, frames left out or cut: an error, or a message within all bounds."""
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(2000):
        frames = [bytearray(frame) for frame in frames_of(dispatch() if rng.random() < 0.5 else reply())]
        for _ in range(int(rng.integers(1, 4))):
            frame = frames[rng.integers(len(frames))]
            if len(frame) and rng.random() < 0.7:
                frame[rng.integers(len(frame))] = rng.integers(256)
            elif rng.random() < 0.5:
                del frame[int(rng.integers(len(frame) + 1)) :]
            elif len(frames) > 1:
                frames.pop(int(rng.integers(len(frames))))
        try:
            message = decoded([bytes(frame) for frame in frames])
        except (ValueError, msgspec.MsgspecError):
            num_refused += 1
            continue
        if isinstance(message, HopMessage):
            LIMITS.check(message.hop, message.records)
            assert len(message.tensor) == message.hop.num_rows
    assert num_refused > 500
