"""Modelled links between paced workers: a message is held until the time at which the link would have brought it.

The sender stamps each message with its arrival at the receiver's port, on the clock that the processes of one machine
share. The receiver lets messages pass its port one after another, as `sim.virtual_links` does on virtual time.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from typing import Any

from moestro.core.experts.hops import HopMessage
from moestro.cost.links import HOP_HEADER_BYTES, Link, hop_bytes
from moestro.cost.networks import NetworkShape
from moestro.wire.hop_frames import NoTensors

_STAMP = struct.Struct("<q")


class StampFrames(NoTensors):
    """Frames of messages without tensors: the stamp, time.monotonic_ns() in 8 bytes, takes the tensor's place.

    Implements `wire.hop_frames.TensorFrames`.
    """

    def pack(self, tensor: Any) -> bytes:
        """Return the bytes of a stamp."""
        return _STAMP.pack(tensor)

    def num_bytes(self, num_rows: int) -> int:
        """Implement `TensorFrames.num_bytes`."""
        return _STAMP.size

    def unpack(self, frame: Any, num_rows: int) -> int:
        """Return the stamp in a frame.

        Raises:
            ValueError: the frame has another size.
        """
        if len(frame) != _STAMP.size:
            raise ValueError(f"{len(frame)} bytes where a stamp has {_STAMP.size}")
        stamp: int = _STAMP.unpack(frame)[0]
        return stamp


class LinkPace:
    """The port of one worker: stamps what it sends, and holds what it receives.

    Args:
        link: link to all other workers; a message occupies it from the sender's port to the receiver's.
        network: network whose hidden states the messages would contain.
        dilation: factor on the link's times.

    Attributes:
        num_messages: messages that were delivered.
        late_ns: times from the modelled arrival of each of them until its delivery.
    """

    def __init__(self, link: Link, network: NetworkShape, dilation: float = 1.0) -> None:
        self._link, self._network, self._dilation = link, network, dilation
        self._sends_at_ns = self._receives_at_ns = 0  # when the port is free
        self._under_way: list[tuple[int, int, HopMessage]] = []  # heap: (arrival at the port, order, message)
        self._in_port: deque[tuple[int, HopMessage]] = deque()  # (time at which it is through, message)
        self._num_held = 0
        self.num_messages = self.late_ns = 0

    def stamp(self, message: HopMessage, now_ns: int) -> HopMessage:
        """Return `message` with its arrival at the receiver's port in place of a tensor."""
        start_ns = max(now_ns, self._sends_at_ns)
        self._sends_at_ns = start_ns + round(self._link.message_ns * self._dilation) + self._port_ns(message)
        arrives_ns = self._sends_at_ns + round(self._link.latency_ns * self._dilation)
        return HopMessage(message.hop, message.records, arrives_ns)

    def deliver(self, messages: list[HopMessage], now_ns: int) -> list[HopMessage]:
        """Hold `messages`, which carry stamps, and return all held ones that are due, without stamps."""
        for message in messages:
            self._num_held += 1  # messages of one channel keep their order where stamps are equal
            heapq.heappush(self._under_way, (message.tensor, self._num_held, message))
        while self._under_way and self._under_way[0][0] <= now_ns:
            arrives_ns, _, message = heapq.heappop(self._under_way)
            self._receives_at_ns = max(arrives_ns, self._receives_at_ns + self._port_ns(message))
            self._in_port.append((self._receives_at_ns, message))
        due = []
        while self._in_port and self._in_port[0][0] <= now_ns:
            through_ns, message = self._in_port.popleft()
            self.num_messages += 1
            self.late_ns += now_ns - through_ns
            due.append(HopMessage(message.hop, message.records))
        return due

    def ready_at_ns(self) -> int | None:
        """Time at which `deliver` has something to do; None if it holds nothing."""
        times = [each[0][0] for each in (self._in_port, self._under_way) if each]
        return min(times, default=None)

    def _port_ns(self, message: HopMessage) -> int:
        num_bytes = HOP_HEADER_BYTES + hop_bytes(self._network, message.hop.num_rows, len(message.records))
        return round(self._link.port_ns(num_bytes) * self._dilation)
