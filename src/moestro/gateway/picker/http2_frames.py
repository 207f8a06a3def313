"""Frames of HTTP/2 (RFC 9113): their numbers, how they are written, their header blocks, and how many may come."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from hpack import Decoder, HPACKError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES: Final = 16_384  # In both directions; every peer takes frames of this size.
MAX_HEADER_BYTES: Final = 16 << 10  # Of one header block, packed and unpacked.
MAX_WINDOW: Final = (1 << 31) - 1
DEFAULT_WINDOW: Final = 65_535
_MAX_KNOWN_BLOCKS = 64

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

_FRAME_HEAD = struct.Struct(">BHBBL")
FRAME_HEAD_BYTES: Final = _FRAME_HEAD.size
pack_head, unpack_head = _FRAME_HEAD.pack, _FRAME_HEAD.unpack_from
NUMBER: Final = struct.Struct(">L")
SETTING: Final = struct.Struct(">HL")

_CONNECTION_HEADERS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED_PSEUDO = (b":method", b":scheme", b":path")
_UNSAFE = frozenset(b"\0\r\n")

Fields = dict[bytes, bytes]  # Header fields of a request by name; of several with one name, the last.


class Http2Code(IntEnum):
    """Error code of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(Exception):
    """A fault of the peer that ends its connection."""

    def __init__(self, code: Http2Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return pack_head(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, NUMBER.pack(increment))


def reset(stream_id: int, code: Http2Code) -> bytes:
    """Return an RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, NUMBER.pack(code))


def without_padding(data: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return where the content of a padded frame begins and ends."""
    if begin == end:
        raise Http2Error(Http2Code.FRAME_SIZE_ERROR, "a padded frame has no length of its padding")
    end -= data[begin]
    if end <= begin:
        raise Http2Error(Http2Code.PROTOCOL_ERROR, "a frame has more padding than bytes")
    return begin + 1, end


def number_in(payload: bytes, kind: str) -> int:
    """Return the number that is all of a frame's payload."""
    if len(payload) != NUMBER.size:
        raise Http2Error(Http2Code.FRAME_SIZE_ERROR, f"{kind} has a wrong size")
    number: int = NUMBER.unpack(payload)[0]
    return number


class FrameBudget:
    """Limits the rate of frames that cost work and carry nothing: a burst, and then so many a second.

    Attributes:
        now_ns: Present time; the connection sets it before it reads.
    """

    __slots__ = ("_left", "_refilled_ns", "now_ns")

    BURST = 10_000
    RATE = 1_000  # per second

    def __init__(self, now_ns: int) -> None:
        self._left = self.BURST
        self.now_ns = self._refilled_ns = now_ns

    def spend(self, cost: int = 1) -> None:
        """Count a frame.

        Raises:
            Http2Error: The peer has sent too many.
        """
        self._left -= cost
        if self._left < 0:
            self._left += min(self.BURST, (self.now_ns - self._refilled_ns) * self.RATE // 10**9)
            self._refilled_ns = self.now_ns
            if self._left < 0:
                raise Http2Error(Http2Code.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def earn(self, worth: int) -> None:
        """Count useful work, after which control frames follow."""
        self._left += worth


class HeaderReader:
    """Decodes header blocks, which may span frames.

    Proxies send the same request again and again, and after the first one its block has table indices alone. Such a
    block changes no table, and is decoded once for each state of the table.
    """

    __slots__ = ("_block", "_budget", "_decoder", "_flags", "_known", "stream_id")

    def __init__(self, budget: FrameBudget) -> None:
        self._budget = budget
        self._decoder = Decoder(MAX_HEADER_BYTES)
        self._known: dict[bytes, Fields | None] = {}
        self._block = b""
        self._flags = 0
        self.stream_id = 0  # Of the block that waits for CONTINUATION; 0 means none.

    def begin(self, stream_id: int, flags: int, part: bytes) -> None:
        """Keep the first part of a block."""
        self.stream_id, self._flags, self._block = stream_id, flags, part

    def go_on(self, flags: int, part: bytes) -> tuple[int, bytes] | None:
        """Append to a block; return the flags of its first frame and the block once it is complete."""
        if len(self._block) + len(part) > MAX_HEADER_BYTES:
            raise Http2Error(Http2Code.ENHANCE_YOUR_CALM, "the header block is too long")
        if not part:
            self._budget.spend()
        self._block += part
        if not flags & END_HEADERS:
            return None
        self.stream_id, block, self._block = 0, self._block, b""
        return self._flags, block

    def read(self, block: bytes) -> Fields | None:
        """Decode a complete block; None means that it is no valid request.

        Raises:
            Http2Error: The block cannot be decoded, and so none after it.
        """
        known = self._known
        if block in known:
            return known[block]
        self._budget.spend(len(block) >> 6)
        try:
            pairs = self._decoder.decode(block, raw=True)
        except (HPACKError, ValueError, IndexError) as error:  # ValueError: an index of thousands of digits.
            raise Http2Error(Http2Code.COMPRESSION_ERROR, "the header block cannot be decoded") from error
        fields = _request_fields(pairs)
        if not _has_indices_alone(block) or len(known) >= _MAX_KNOWN_BLOCKS:
            known.clear()
        if _has_indices_alone(block):
            known[block] = fields
        return fields


def _has_indices_alone(block: bytes) -> bool:
    """Return whether a valid header block consists of indexed fields, which leave the decoder's table as it is."""
    is_continued = False
    for byte in block:
        if is_continued:
            is_continued = byte >= 0x80
        elif byte < 0x80:
            return False
        else:
            is_continued = byte == 0xFF
    return True


def _request_fields(pairs: Iterable[tuple[bytes, bytes]]) -> Fields | None:
    """Return the fields of a request by RFC 9113, section 8; None means that they are not valid."""
    fields: Fields = {}
    is_regular = False
    for name, value in pairs:
        if name[:1] == b":":
            if is_regular or name not in _PSEUDO or name in fields:
                return None
        else:
            is_regular = True
            if not name or name != name.lower() or name in _CONNECTION_HEADERS:
                return None
            if name == b"te" and value != b"trailers":
                return None
        if not _UNSAFE.isdisjoint(name) or not _UNSAFE.isdisjoint(value):
            return None
        fields[bytes(name)] = bytes(value)
    return fields if all(fields.get(name) for name in _NEEDED_PSEUDO) else None
