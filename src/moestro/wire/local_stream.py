"""Messages over a stream socket between two processes of one machine, each with its length in front.

Sender and reader write and read the socket themselves. With ZeroMQ, two more threads would pass each message on.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

from moestro.wire.messages import MAX_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16  # Of a flood, the reader takes so much before it does other things.


class FrameError(Exception):
    """A message is longer than `MAX_MESSAGE_BYTES`, or what arrives is no message."""


class FrameReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._num_needed = 0  # Bytes without which `_rest` holds no message.

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes.

        Raises:
            FrameError: A message would be too long.
        """
        if not self._rest and int.from_bytes(data[: _LENGTH.size], "little") == len(data) - _LENGTH.size:
            return [data[_LENGTH.size :]]  # One whole message, as most often.
        if self._rest:
            self._rest += data
            if len(self._rest) < self._num_needed:
                return []  # Looking into a long message at each of its parts would take quadratic time.
            data = bytes(self._rest)
            self._rest.clear()
        messages, at = [], 0
        while len(data) - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_MESSAGE_BYTES:
                raise FrameError(f"a message of {length} bytes")
            if begin + length > len(data):
                self._num_needed = begin + length - at
                break
            messages.append(data[begin : begin + length])
            at = begin + length
        else:
            self._num_needed = _LENGTH.size
        if at < len(data):
            self._rest += data[at:]
        return messages


class LocalStream:
    """One end of a connection. No method blocks.

    Only one thread at a time may call `receive`, and only one at a time the others.

    Args:
        connection: Connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        self._socket = connection
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()

    @property
    def num_queued(self) -> int:
        """Messages that the kernel has not taken completely."""
        return len(self._unsent)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._socket.fileno()

    def send(self, message: bytes) -> bool:
        """Send `message`, or queue what the kernel does not take now. Returns whether nothing is queued.

        Raises:
            OSError: The connection is gone.
        """
        frame = _LENGTH.pack(len(message)) + message
        if not self._unsent:
            num_sent = self._try(frame)
            if num_sent == len(frame):
                return True
            frame = frame[num_sent:]
        self._unsent.append(memoryview(frame))
        return False

    def flush(self) -> None:
        """Send what is queued, as far as the kernel takes it; raises as `send` does."""
        while self._unsent:
            frame = self._unsent[0]
            num_sent = self._try(frame)
            if num_sent < len(frame):
                self._unsent[0] = frame[num_sent:]
                return
            self._unsent.popleft()

    def _try(self, frame: bytes | memoryview) -> int:
        """Return the number of bytes that the kernel takes."""
        try:
            return self._socket.send(frame)
        except BlockingIOError:
            return 0

    def receive(self) -> list[bytes] | None:
        """Return the messages that have arrived, perhaps not all of them; None at the end of the connection.

        Raises:
            FrameError: What arrives is no message.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # Reset by the other end.
            return None
        return self._reader.feed(data) if data else None

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        self._socket.close()


def local_path(address: str) -> str:
    """Return the path of the socket of an address ipc://PATH."""
    return address.removeprefix("ipc://")
