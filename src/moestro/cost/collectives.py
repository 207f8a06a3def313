"""Times of the collectives between a layer's attention and its experts, for baselines that exchange in lock-step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.cost.links import Link, Machines
from moestro.cost.networks import NetworkShape

Int64s = NDArray[np.int64]

_NS = 1e9
_ACTIVATION_BYTES = 2


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
