"""ZMTP 3.0, the protocol of ZeroMQ's sockets, for one end of one connection: sans-IO, bounded in bytes.

libzmq counts what it holds in messages and bounds a frame (`ZMQ_MAXMSGSIZE`). It bounds neither the frames of a message
nor the bytes of a queue: a peer whose message never ends fills the memory of the process. Publishers of KV events and
their listeners do not trust each other, so both speak the protocol themselves, with a bound on what a peer can make
them hold. It is the small part without security and without reconnection. Sources: https://rfc.zeromq.org/spec/23/ and
https://rfc.zeromq.org/spec/37/ (subscriptions that are commands).
"""

from __future__ import annotations

import socket

from moestro.errors import MoestroError

_SIGNATURE_AT = (0, 9)  # places of 0xFF and 0x7F in a greeting
_GREETING_BYTES = 64
_MAJOR_AT, _MECHANISM_AT = 10, slice(12, 32)
_MAJOR, _MINOR = 3, 0
_MECHANISM = b"NULL".ljust(20, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_COMMAND_BYTES = 4096  # of READY and PING; libzmq's own have less than 100
_MAX_FRAMES = 16  # of one message; a replayed batch has five

SUBSCRIBE, CANCEL = b"\x01", b"\x00"  # first byte of a subscription; a topic follows
SUBSCRIBE_TO_ALL = (SUBSCRIBE,)
_SUBSCRIPTIONS = {b"SUBSCRIBE": SUBSCRIBE, b"CANCEL": CANCEL}  # commands, of peers that speak ZMTP 3.1


class ZmtpError(MoestroError):
    """The peer breaks the protocol or a bound, so that nothing after it can be read."""


def greeting() -> bytes:
    """Return what each end sends first."""
    return b"\xff" + bytes(8) + b"\x7f" + bytes([_MAJOR, _MINOR]) + _MECHANISM + bytes(32)


def ready(socket_type: bytes) -> bytes:
    """Return the handshake of a socket of `socket_type`, which follows the greeting."""
    properties = _property(b"Socket-Type", socket_type) + _property(b"Identity", b"")
    return _frame(_COMMAND, _named(b"READY") + properties)


def message(frames: tuple[bytes, ...]) -> bytes:
    """Encode one message."""
    return message_head(frames[:-1], len(frames[-1])) + frames[-1]


def message_head(frames: tuple[bytes, ...], last_bytes: int) -> bytes:
    """Encode a message up to the body of its last frame, which the caller sends without copying it.

    Args:
        frames: frames before the last one.
        last_bytes: size of the last frame.
    """
    return b"".join([_frame(_MORE, each) for each in frames]) + _frame_head(0, last_bytes)


class ZmtpReader:
    """Splits what a peer sends into messages, which the caller takes one by one.

    The caller stops adding where `num_held_bytes` reaches its bound and `wants_more` is false.

    Args:
        peers: socket types that the peer may have.
        max_message_bytes: limit of a message.

    Attributes:
        is_made: whether the handshake is complete.
    """

    def __init__(self, peers: frozenset[bytes], max_message_bytes: int) -> None:
        self.is_made = False
        self._peers = peers
        self._max_message_bytes = max_message_bytes
        self._has_greeting = False
        self._held = bytearray()
        self._needed = _GREETING_BYTES  # bytes without which nothing can be read
        self._frames: list[bytes] = []
        self._num_frame_bytes = 0

    @property
    def num_held_bytes(self) -> int:
        """Bytes that were added and not taken."""
        return len(self._held) + self._num_frame_bytes

    @property
    def wants_more(self) -> bool:
        """Whether nothing can be taken until more bytes are added."""
        return len(self._held) < self._needed

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._held += data

    def take(self) -> tuple[list[bytes] | None, bytes]:
        """Read a frame or less.

        Returns:
            A message, if the frame completed one, and bytes to send to the peer.

        Raises:
            ZmtpError: the peer breaks the protocol or a bound.
        """
        if self.wants_more:
            return None, b""
        if not self._has_greeting:
            self._check_greeting(bytes(self._held[:_GREETING_BYTES]))
            self._drop(_GREETING_BYTES)
            self._has_greeting = True
            return None, b""
        flags, begin, size = self._head()
        if len(self._held) < begin + size:
            self._needed = begin + size
            return None, b""
        body = bytes(memoryview(self._held)[begin : begin + size])
        self._drop(begin + size)
        if flags & _COMMAND:
            return self._obey(body)
        return self._completed(body, is_last=not flags & _MORE), b""

    def _head(self) -> tuple[int, int, int]:
        """Return the flags of the next frame, where its body begins, and its size; size 0 and no body if unknown."""
        flags = self._held[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ZmtpError(f"a frame has unknown flags {flags}")
        begin = 9 if flags & _LONG else 2
        if len(self._held) < begin:
            return flags, begin, 0
        size = int.from_bytes(self._held[1:begin], "big")
        if flags & _COMMAND:
            if size > _MAX_COMMAND_BYTES:
                raise ZmtpError(f"a command has {size:,} bytes; the limit is {_MAX_COMMAND_BYTES:,}")
        elif self._num_frame_bytes + size > self._max_message_bytes:
            raise ZmtpError(
                f"a message has at least {self._num_frame_bytes + size:,} bytes; the limit is"
                f" {self._max_message_bytes:,}"
            )
        return flags, begin, size

    def _completed(self, body: bytes, *, is_last: bool) -> list[bytes] | None:
        if not self.is_made:
            raise ZmtpError("a message precedes the handshake")
        self._frames.append(body)
        self._num_frame_bytes += len(body)
        if len(self._frames) > _MAX_FRAMES:
            raise ZmtpError(f"a message has more than {_MAX_FRAMES} frames")
        if not is_last:
            return None
        frames, self._frames, self._num_frame_bytes = self._frames, [], 0
        return frames

    def _obey(self, body: bytes) -> tuple[list[bytes] | None, bytes]:
        """Handle a command, and return the message that it stands for, if any, and the answer."""
        name, rest = _taken(body)
        if not self.is_made:
            if name != b"READY":
                raise ZmtpError(f"the handshake has command {name[:16]!r} in place of READY")
            kind = _properties(rest).get(b"socket-type", b"")
            if kind not in self._peers:
                expected = " or ".join(sorted(each.decode() for each in self._peers))
                raise ZmtpError(f"the peer is a socket of type {kind[:16]!r}; expected {expected}")
            self.is_made = True
        elif name == b"PING":  # two bytes of time to live, and a context that the answer repeats
            return None, _frame(_COMMAND, _named(b"PONG") + rest[2:18])
        elif b"SUB" in self._peers and name in _SUBSCRIPTIONS:
            return [_SUBSCRIPTIONS[name] + rest], b""
        return None, b""

    def _check_greeting(self, given: bytes) -> None:
        first, last = _SIGNATURE_AT
        if given[first] != 0xFF or given[last] != 0x7F:
            raise ZmtpError("the peer does not speak ZeroMQ's protocol")
        if given[_MAJOR_AT] < _MAJOR:
            raise ZmtpError(f"the peer speaks version {given[_MAJOR_AT]} of ZeroMQ's protocol; 3 is needed")
        if given[_MECHANISM_AT] != _MECHANISM:
            raise ZmtpError("the peer demands a security mechanism, which KV events have not")

    def _drop(self, num_bytes: int) -> None:
        del self._held[:num_bytes]
        self._needed = 2


def _frame(flags: int, body: bytes) -> bytes:
    return _frame_head(flags, len(body)) + body


def _frame_head(flags: int, num_bytes: int) -> bytes:
    if num_bytes < 256:
        return bytes([flags, num_bytes])
    return bytes([flags | _LONG]) + num_bytes.to_bytes(8, "big")


def _named(name: bytes) -> bytes:
    return bytes([len(name)]) + name


def _property(name: bytes, value: bytes) -> bytes:
    return _named(name) + len(value).to_bytes(4, "big") + value


def _taken(body: bytes) -> tuple[bytes, bytes]:
    """Split off a name that its length precedes."""
    end = 1 + body[0] if body else 0
    return body[1:end], body[end:]


def _properties(rest: bytes) -> dict[bytes, bytes]:
    """Read the properties of READY, by their names in lower case. What is cut off is left out."""
    found = {}
    while rest:
        name, rest = _taken(rest)
        size = int.from_bytes(rest[:4], "big")
        found[name.lower()] = rest[4 : 4 + size]
        rest = rest[4 + size :]
    return found


# Detection of a machine that vanished without closing its connection.

# After 5 s of silence, within 15 s. Some systems lack one of the options.
_OPTIONS = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe a silent TCP connection, and end it if the other machine does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
