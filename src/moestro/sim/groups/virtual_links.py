"""Links between workers on virtual time: each message leaves when its sender is free, and arrives in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moestro.core.experts.hops import HopMessage
from moestro.cost.links import HOP_HEADER_BYTES, Machines, hop_bytes
from moestro.cost.networks import NetworkShape


@dataclass(slots=True, eq=False)
class Transfer:
    """A message under way.

    Attributes:
        crosses: whether it goes from one machine to another.
        port_ns: time that its bytes take at the receiver's port.
        is_through: whether it has passed the receiver's port.
    """

    message: HopMessage
    crosses: bool
    port_ns: int
    is_through: bool = False


# (transfer, time at which it reaches the receiver's port) -> None
Arrive = Callable[[Transfer, int], None]


class VirtualLinks:
    """The links of all workers of a group.

    A worker has a port for the links of its machine and one for those to other machines. A sender's messages over one
    port follow one another. Two senders cannot fill a receiver's port at once: messages pass it in the order in which
    they reach it.

    Args:
        machines: machine of each worker, and the links between them.
        network: network whose hidden states are sent.
        arrive: called when a message is sent, with the time at which it would arrive at an idle port. The caller then
            asks `receive`.

    Attributes:
        num_messages, num_bytes: totals since the start.
    """

    def __init__(self, machines: Machines, network: NetworkShape, arrive: Arrive) -> None:
        self._machines, self._arrive = machines, arrive
        self._network = network
        num_workers = len(machines.machine_of)
        # By [crosses machines][worker]: when its port is free.
        self._sends_at = [[0] * num_workers, [0] * num_workers]
        self._receives_at = [[0] * num_workers, [0] * num_workers]
        self.num_messages = self.num_bytes = 0

    def send(self, message: HopMessage, now_ns: int) -> None:
        """Send a message."""
        hop, machine_of = message.hop, self._machines.machine_of
        source, crosses = hop.src, machine_of[hop.src] != machine_of[hop.dst]
        link = self._machines.across if crosses else self._machines.within
        num_bytes = HOP_HEADER_BYTES + hop_bytes(self._network, hop.num_rows, len(message.records))
        port_ns = link.port_ns(num_bytes)
        sends_at = self._sends_at[crosses]
        sends_at[source] = max(now_ns, sends_at[source]) + link.message_ns + port_ns
        self.num_messages += 1
        self.num_bytes += num_bytes
        self._arrive(Transfer(message, crosses, port_ns), sends_at[source] + link.latency_ns)

    def receive(self, transfer: Transfer, now_ns: int) -> int:
        """Let a message that has arrived pass the receiver's port. Returns the time at which it is through."""
        if transfer.is_through:
            return now_ns
        receives_at, worker = self._receives_at[transfer.crosses], transfer.message.hop.dst
        receives_at[worker] = max(now_ns, receives_at[worker] + transfer.port_ns)
        transfer.is_through = True
        return receives_at[worker]
