"""Links between GPUs, and collectives over them: what a message costs its sender, and when it arrives.

Messages of one sender over one link follow one another. Prices are those of NCCL's point-to-point calls, because AMoE
sends by NCCL (section 3.5) and its constants are public. Collectives are for baselines that exchange in lock-step,
between a layer's attention and its experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import HOP_RECORD
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
# 1,800 GB/s both ways (data sheet), of which the same part is assumed as NCCL reaches between two H200.
NVSWITCH_B200 = Link(name="nvswitch-b200", message_ns=_START_NS, latency_ns=_NVLINK_LATENCY_NS, bytes_per_s=532e9)
# AMD's MI300X: seven links of 64 GB/s one way (data sheet), of which the same part is assumed.
INFINITY_FABRIC_MI300X = Link(
    name="infinity-fabric-mi300x", message_ns=_START_NS, latency_ns=_NVLINK_LATENCY_NS, bytes_per_s=265e9
)
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

# Memory that processes of one machine share, through a local socket: an order of magnitude.
LOCAL_SOCKET = Link(name="local-socket", message_ns=10_000, latency_ns=10_000, bytes_per_s=4e9)

# Takes no time: an ideal that bounds what better links could gain.
FREE_LINK = Link(name="free", message_ns=0, latency_ns=0, bytes_per_s=math.inf)

LINKS = {
    link.name: link
    for link in (
        NVSWITCH_A100,
        NVSWITCH_H100,
        NVSWITCH_B200,
        INFINITY_FABRIC_MI300X,
        INFINIBAND_HDR,
        INFINIBAND_NDR,
        EFA_P4D,
        ETHERNET_100G,
        LOCAL_SOCKET,
    )
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


Int64s = NDArray[np.int64]

_NS = 1e9


class Collective(Protocol):
    """Prices the collective before the experts of a layer; the one after them takes as long."""

    @property
    def is_free(self) -> bool:
        """Whether every collective takes no time."""
        ...

    def exchange_ns(self, sent: Int64s, num_tokens: Int64s) -> Int64s:
        """Return the time of one collective in each layer, int64[layers], ns.

        Args:
            sent: int64[ranks, workers, layers], expert rows that each rank has for each worker. Rank r is worker r.
            num_tokens: int64[ranks], tokens of each rank.
        """
        ...

    def dense_layer_ns(self, num_tokens: int) -> int:
        """Return the time of the collectives of a layer without routed experts, ns, for a rank's tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll:
    """All-to-all between the ranks and the workers of the experts.

    A token's row crosses once for each worker that it visits, as in DeepEP: rows to one worker are at most the tokens.
    With `row_per_expert` it crosses once for each expert, as in pplx-kernels (csrc/all_to_all/intranode_dispatch.cu).
    Rows that stay on their worker cost nothing. The worker that sends or receives the most sets the time.

    Attributes:
        start_ns: time of an exchange without rows, ns.
        bytes_per_s: bandwidth of a worker in one direction, bytes per second.
        row_bytes: bytes of a token's hidden state.
        row_per_expert: whether a token's row crosses once for each expert, and not once for each worker.
    """

    start_ns: float
    bytes_per_s: float
    row_bytes: int
    row_per_expert: bool = False

    @property
    def is_free(self) -> bool:
        """Whether every exchange takes no time."""
        return self.start_ns == 0 and (self.row_bytes == 0 or math.isinf(self.bytes_per_s))

    def exchange_ns(self, sent: Int64s, num_tokens: Int64s) -> Int64s:
        """Implement `Collective.exchange_ns`."""
        num_ranks, num_workers, num_layers = sent.shape
        if self.is_free or num_workers == 1 or not num_tokens.any():
            return np.zeros(num_layers, np.int64)
        crossing = sent.copy() if self.row_per_expert else np.minimum(sent, num_tokens[:, None, None])
        own = np.arange(min(num_ranks, num_workers))
        crossing[own, own] = 0
        busiest = np.maximum(crossing.sum(axis=1).max(axis=0), crossing.sum(axis=0).max(axis=0))
        times: Int64s = np.rint(self.start_ns + busiest * (self.row_bytes / self.bytes_per_s * _NS)).astype(np.int64)
        return times

    def dense_layer_ns(self, num_tokens: int) -> int:
        """Return 0, because a layer without routed experts needs no exchange."""
        return 0


FREE = AllToAll(start_ns=0, bytes_per_s=math.inf, row_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesAllToAll:
    """All-to-all between workers on several machines: rows inside a machine and between machines cross at once.

    Attributes:
        within, across: prices of either kind of row; the slower one sets the time.
        machine_of: machine of each worker.
    """

    within: AllToAll
    across: AllToAll
    machine_of: tuple[int, ...]

    @property
    def is_free(self) -> bool:
        """Whether every exchange takes no time."""
        return self.within.is_free and self.across.is_free

    def exchange_ns(self, sent: Int64s, num_tokens: Int64s) -> Int64s:
        """Implement `Collective.exchange_ns`."""
        machine = np.array(self.machine_of)
        stays = (machine[: len(sent), None] == machine)[:, :, None]
        within_ns = self.within.exchange_ns(sent * stays, num_tokens)
        return np.maximum(within_ns, self.across.exchange_ns(sent * ~stays, num_tokens))

    def dense_layer_ns(self, num_tokens: int) -> int:
        """Return 0, because a layer without routed experts needs no exchange."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """All-reduce inside a tensor-parallel replica, after attention and after the experts of every layer.

    A ring over g GPUs sends 2 (g - 1) / g of the data through each link (Patarasuk and Yuan, 2009).

    Attributes:
        num_gpus: GPUs of the replica.
        start_ns: time of an all-reduce without data, ns.
        bytes_per_s: bandwidth of a GPU in one direction, bytes per second.
        row_bytes: bytes of a token's hidden state.
    """

    num_gpus: int
    start_ns: float
    bytes_per_s: float
    row_bytes: int

    @property
    def is_free(self) -> bool:
        """Whether the replica is a single GPU."""
        return self.num_gpus == 1

    def exchange_ns(self, sent: Int64s, num_tokens: Int64s) -> Int64s:
        """Implement `Collective.exchange_ns`; the replica counts as one rank."""
        return np.full(sent.shape[2], self.all_reduce_ns(int(num_tokens.sum())), np.int64)

    def dense_layer_ns(self, num_tokens: int) -> int:
        """Return the time of the two all-reduces of a layer, ns."""
        return 2 * self.all_reduce_ns(num_tokens)

    def all_reduce_ns(self, num_tokens: int) -> int:
        """Return the time of one all-reduce of the hidden states of `num_tokens` tokens, ns."""
        if self.num_gpus == 1 or num_tokens == 0:
            return 0
        crossing = 2 * (self.num_gpus - 1) / self.num_gpus * num_tokens * self.row_bytes
        return round(self.start_ns + crossing / self.bytes_per_s * _NS)


# --- over links -------------------------------------------------------------------------------------------------------


def all_to_all(link: Link, network: NetworkShape) -> AllToAll:
    """Price an all-to-all whose workers all have this link, for hidden states of 2 bytes an element."""
    return AllToAll(
        start_ns=link.message_ns + link.latency_ns,
        bytes_per_s=link.bytes_per_s,
        row_bytes=_ACTIVATION_BYTES * network.hidden_size,
    )


# An exchange of pplx-kernels of one token in a node takes 41.6 us (dispatch) and 41.7 us (combine) on eight H100
# (Perplexity, "Efficient and Portable Mixture-of-Experts Communication", 2025). Taken for A100s too, for want of one.
PPLX_START_NS = 41_600
# Of the link's peak in one direction; the roofline's all-to-all has the same.
_PPLX_EFFICIENCY = 0.75


def pplx_all_to_all(link_bytes_per_s: float, network: NetworkShape) -> AllToAll:
    """Price an all-to-all of pplx-kernels within a machine: a late start, and a row for each expert of a token.

    Args:
        link_bytes_per_s: peak bandwidth of a GPU's links in one direction.
    """
    return AllToAll(
        start_ns=PPLX_START_NS,
        bytes_per_s=link_bytes_per_s * _PPLX_EFFICIENCY,
        row_bytes=_ACTIVATION_BYTES * network.hidden_size,
        row_per_expert=True,
    )


def all_to_all_of(machines: Machines, network: NetworkShape) -> Collective:
    """Price an all-to-all between the workers of machines."""
    within = all_to_all(machines.within, network)
    if len(set(machines.machine_of)) == 1:
        return within
    across = all_to_all(machines.across, network)
    return MachinesAllToAll(within=within, across=across, machine_of=machines.machine_of)


def all_reduce(link: Link, network: NetworkShape, num_gpus: int) -> AllReduce:
    """Price the all-reduces of a replica whose GPUs all have this link."""
    return AllReduce(
        num_gpus=num_gpus,
        start_ns=link.message_ns + link.latency_ns,
        bytes_per_s=link.bytes_per_s,
        row_bytes=_ACTIVATION_BYTES * network.hidden_size,
    )
