"""Links between workers on virtual time: each message leaves when its sender is free, and arrives in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moestro.core.hops import HOP_RECORD, HopMessage
from moestro.cost.links import Machines

_HEADER_BYTES = 64  # a packed `Hop`, about
_ACTIVATION_BYTES = 2

# (message, its time of arrival) -> None
Deliver = Callable[[HopMessage, int], None]


class VirtualLinks:
    """The links of all workers of a group.

    A sender's messages over one kind of link follow one another, and so do the messages that one worker receives.

    Args:
        machines: machine of each worker, and the links between them.
        hidden_size: values of a row.
        deliver: called when a message is sent, with its time of arrival.

    Attributes:
        num_messages, num_bytes: totals since the start.
    """

    def __init__(self, machines: Machines, hidden_size: int, deliver: Deliver) -> None:
        self._machines, self._deliver = machines, deliver
        self._row_bytes = hidden_size * _ACTIVATION_BYTES
        num_workers = len(machines.machine_of)
        self._sends_at = np.zeros((2, num_workers), np.int64).tolist()  # by [crosses machines][sender]
        self._receives_at = [0] * num_workers
        self.num_messages = self.num_bytes = 0

    def send(self, message: HopMessage, now_ns: int) -> None:
        """Send a message."""
        hop = message.hop
        link = self._machines.link(hop.src, hop.dst)
        crosses = self._machines.machine_of[hop.src] != self._machines.machine_of[hop.dst]
        num_bytes = _HEADER_BYTES + len(message.records) * HOP_RECORD.itemsize + hop.num_rows * self._row_bytes
        sends_at = self._sends_at[crosses]
        sends_at[hop.src] = max(now_ns, sends_at[hop.src]) + link.sending_ns(num_bytes)
        arrives_ns = sends_at[hop.src] + link.latency_ns
        # Two senders cannot fill a receiver's port at once: each message needs it for its own bytes.
        port_ns = round(num_bytes / link.bytes_per_s * 1e9)
        arrives_ns = max(arrives_ns, self._receives_at[hop.dst] + port_ns)
        self._receives_at[hop.dst] = arrives_ns
        self.num_messages += 1
        self.num_bytes += num_bytes
        self._deliver(message, arrives_ns)
