"""Links between GPUs: what one message costs its sender, and when it arrives.

Messages of one sender over one link follow one another. Prices are those of NCCL's point-to-point calls, because AMoE
sends by NCCL (section 3.5) and its constants are public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moestro.core.experts.hops import HOP_RECORD
from moestro.cost.networks import NetworkShape
from moestro.errors import ConfigError

_ACTIVATION_BYTES = 2
HOP_HEADER_BYTES = 64  # a packed `Hop`, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link, as one of the GPUs at its ends sees it.

    Attributes:
        name: name in messages and reports.
        message_ns: time that each message takes its sender before the first byte leaves, ns.
        latency_ns: time from the end of sending to the arrival, ns.
        bytes_per_s: bandwidth in one direction that large messages reach, bytes a second.
    """

    name: str
    message_ns: int
    latency_ns: int
    bytes_per_s: float

    def sending_ns(self, num_bytes: int) -> int:
        """Time for which a message of `num_bytes` keeps the sender's side of the link busy, ns."""
        return self.message_ns + self.port_ns(num_bytes)

    def port_ns(self, num_bytes: int) -> int:
        """Time that `num_bytes` take through a port, ns."""
        return round(num_bytes / self.bytes_per_s * 1e9)

    def transfer_ns(self, num_bytes: int) -> int:
        """Time from the start of sending `num_bytes` over an idle link to the arrival, ns."""
        return self.sending_ns(num_bytes) + self.latency_ns


# NCCL's own estimates (src/graph/tuning.cc, ring, protocol Simple): 8.4 us to start an operation, then 3.4 us over
# NVLink and 14 us over a network. Their sum over NVLink, 11.8 us, agrees with 10.5 us measured for a small all-to-all
# of two A100 (AIConfigurator's table, NCCL 2.27).
_START_NS = 8_400
_NVLINK_LATENCY_NS, _NETWORK_LATENCY_NS = 3_400, 14_000
# Large messages reach nine tenths of an InfiniBand port: DeepEP's README reports 43 to 47 of 50 GB/s. Assumed for the
# other network cards too.
_OF_A_PORT = 0.9

# 600 GB/s both ways (data sheet). NCCL between two A100 reaches 150 GB/s one way (AIConfigurator, 67 MB).
NVSWITCH_A100 = Link(name="nvswitch-a100", message_ns=_START_NS, latency_ns=_NVLINK_LATENCY_NS, bytes_per_s=150e9)
# 900 GB/s both ways (data sheet). NCCL between two H200 reaches 266 GB/s one way (AIConfigurator, 67 MB in 252 us).
NVSWITCH_H100 = Link(name="nvswitch-h100", message_ns=_START_NS, latency_ns=_NVLINK_LATENCY_NS, bytes_per_s=266e9)
# A port of 200 Gb/s for each GPU, as in DGX A100. nccl-tests issue 214 measures 31 to 34 us for small messages between
# two A40 in two hosts, so 22.4 us in all is a good installation's.
INFINIBAND_HDR = Link(
    name="infiniband-hdr", message_ns=_START_NS, latency_ns=_NETWORK_LATENCY_NS, bytes_per_s=25e9 * _OF_A_PORT
)
# A port of 400 Gb/s for each GPU, as in DGX H100.
INFINIBAND_NDR = Link(
    name="infiniband-ndr", message_ns=_START_NS, latency_ns=_NETWORK_LATENCY_NS, bytes_per_s=50e9 * _OF_A_PORT
)
# AWS p4d: four cards of 100 Gb/s for eight GPUs (AMoE, table 2). Assumed: both GPUs of a card send at once. Latency:
# the value that AWS's plug-in for NCCL states for p4d and p5 (aws-ofi-nccl, platform table), a cautious one.
EFA_P4D = Link(name="efa-p4d", message_ns=_START_NS, latency_ns=75_000, bytes_per_s=12.5e9 / 2 * _OF_A_PORT)
# One port of 100 Gb/s for each GPU, through the kernel's TCP. Assumptions: 30 us one way, and 20 us of system calls and
# copies for each message.
ETHERNET_100G = Link(name="ethernet-100g", message_ns=20_000, latency_ns=30_000, bytes_per_s=12.5e9 * _OF_A_PORT)

# Takes no time: an ideal that bounds what better links could gain.
FREE_LINK = Link(name="free", message_ns=0, latency_ns=0, bytes_per_s=math.inf)

LINKS = {
    link.name: link for link in (NVSWITCH_A100, NVSWITCH_H100, INFINIBAND_HDR, INFINIBAND_NDR, EFA_P4D, ETHERNET_100G)
}

# AMoE announces each batch by ZeroMQ before NCCL sends it. One way by pyzmq over TCP on one machine takes 17 us, half
# of a measured round trip. Between machines, a kernel's TCP adds its 30 us (an assumption, as above).
ANNOUNCE_NS, ANNOUNCE_REMOTELY_NS = 17_000, 47_000


def link_named(name: str) -> Link:
    """Look up a link by name, in any case.

    Raises:
        ConfigError: the name is unknown.
    """
    link = LINKS.get(name.lower())
    if link is None:
        raise ConfigError(f"no constants for link {name!r}; known: {', '.join(LINKS)}")
    return link


def two_phase(link: Link, announce_ns: int = ANNOUNCE_NS) -> Link:
    """Return `link` under AMoE's two phases: an announcement by a message queue, then NCCL's send and receive.

    The announcement delays every message. It does not keep the link busy, because announcements overtake transfers.

    Args:
        link: link of the second phase.
        announce_ns: time until the receiver knows of the message, ns.
    """
    return replace(link, name=f"{link.name}, two phases", latency_ns=link.latency_ns + announce_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Workers on machines, and the links between them.

    Attributes:
        machine_of: machine of each worker.
        within: link between two workers of one machine.
        across: link between workers of different machines.
    """

    machine_of: tuple[int, ...]
    within: Link
    across: Link

    def link(self, source: int, target: int) -> Link:
        """Link between two different workers."""
        return self.within if self.machine_of[source] == self.machine_of[target] else self.across


def with_both_kinds(machines: Machines, num_homes: int, num_expert_workers: int) -> Machines:
    """Return `machines` with attention and expert workers on each of them, as evenly as they go.

    Args:
        machines: machines of all workers.
        num_homes: attention workers, which are the first ones.
        num_expert_workers: expert workers, which follow.
    """
    num_machines = max(machines.machine_of) + 1
    machine_of = [worker * num_machines // num_homes for worker in range(num_homes)]
    machine_of += [worker * num_machines // num_expert_workers for worker in range(num_expert_workers)]
    return replace(machines, machine_of=tuple(machine_of))


def hop_bytes(network: NetworkShape, num_rows: int, num_records: int) -> int:
    """Bytes of a message between workers: one hidden state for each row, and a record for each (token, choice).

    Args:
        network: network whose hidden states are sent, in 2 bytes an element.
        num_rows: rows of the tensor: tokens of a dispatch, records of a reply.
        num_records: (token, choice) pairs.
    """
    return num_rows * network.hidden_size * _ACTIVATION_BYTES + num_records * HOP_RECORD.itemsize
