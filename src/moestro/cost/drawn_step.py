"""Stage times of one step of ranks in lock-step, from experts that are drawn for every token.

The draw depends only on the token and the layer, so every baseline and every number of ranks sees the same experts. A
step may be cut into micro-batches; each rank cuts its own batch by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.work import Keys
from moestro.cost.links import FREE, Collective
from moestro.cost.model import Batch, Int64s, StageCostModel
from moestro.cost.roofline import HostCost

_GOLDEN = (5**0.5 - 1) / 2  # multiples of it modulo 1 spread evenly


class ExpertPrices:
    """Prices of one expert by number of rows, computed once for each number.

    Args:
        cost: prices of the stages.
    """

    def __init__(self, cost: StageCostModel) -> None:
        self._cost = cost
        self._prices: Int64s = np.zeros(1, np.int64)

    def of(self, rows: Int64s) -> Int64s:
        """Return the time of a call over each number of rows, in the shape of `rows`; no rows take no time."""
        most = int(rows.max(initial=0))
        if most >= len(self._prices):
            missing = range(len(self._prices), max(2 * len(self._prices), most + 1))
            added = np.array([self._cost.expert_ns(num_rows) for num_rows in missing], np.int64)
            self._prices = np.concatenate([self._prices, added])
        return self._prices[rows]


class SlotRows:
    """Slots of a table, as the indices that turn counts of logical experts into rows of slots.

    An expert's tokens are spread over its live copies: evenly, or by the shares of a table that has them. The remainder
    goes to another copy for each source rank.

    Args:
        table: slots of each worker.

    Attributes:
        is_live: bool[workers, layers, slots], slots that hold an expert of a live worker.
        has_copies: whether an expert has several of them.
    """

    def __init__(self, table: ExpertTable) -> None:
        live = table.logical_of != EMPTY
        live &= table.is_alive[:, None, None]
        self.is_live = live
        self._expert = np.where(live, table.logical_of, 0)
        self._layer = np.arange(live.shape[1])[None, :, None]
        copies = table.num_copies * table.is_alive[:, None, None]
        self._num_copies: Int64s = copies.sum(axis=0)[self._layer, self._expert]
        before = copies.cumsum(axis=0) - copies
        self._index: Int64s = before[np.arange(len(live))[:, None, None], self._layer, self._expert]
        self.has_copies = bool((self._num_copies > 1)[live].any())
        flat = self._layer * table.num_experts + self._expert
        self._flat: Int64s = np.broadcast_to(flat, live.shape).ravel()
        self._ends = None if table.shares is None or not self.has_copies else _share_ends(table)
        self._phase: NDArray[np.float64] = (self._flat * _GOLDEN % 1).reshape(live.shape)  # one for each expert

    def rows(self, counts: Int64s) -> Int64s:
        """Divide tokens of logical experts among slots.

        Args:
            counts: int64[parts, sources, layers, experts], tokens of each source rank that visit each logical expert.

        Returns:
            int64[parts, sources, workers, layers, slots], tokens of each slot.
        """
        rows: Int64s = counts.reshape(*counts.shape[:2], -1).take(self._flat, axis=2)
        rows = rows.reshape(*counts.shape[:2], *self.is_live.shape)
        if self._ends is not None:
            rows = self._by_shares(rows)
        elif self.has_copies:
            source = np.arange(counts.shape[1])[:, None, None, None]
            rows = (rows + self._num_copies - 1 - (self._index + source) % self._num_copies) // self._num_copies
        rows *= self.is_live
        return rows

    def _by_shares(self, rows: Int64s) -> Int64s:
        """Divide the tokens of each expert by shares: a copy gets the whole numbers in its part of a line of tokens.

        The line of each source begins at another fraction, so that small counts of several sources do not all fall on
        the copy with the largest share.
        """
        assert self._ends is not None, "called for tables with shares"
        begins, ends = self._ends
        offset = (np.arange(rows.shape[1])[:, None, None, None] * _GOLDEN + self._phase) % 1
        divided: Int64s = (np.floor(rows * ends + offset) - np.floor(rows * begins + offset)).astype(np.int64)
        return divided


def _share_ends(table: ExpertTable) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Begin and end of each slot's part of its expert's tokens, float64[workers, layers, slots] each, in 0 .. 1."""
    parts = table.parts
    ends = parts.cumsum(axis=0)
    ends[-1] = 1.0  # exactly, so that no token is lost to rounding
    last = np.where(parts > 0, np.arange(len(parts))[:, None, None], -1).max(axis=0)
    ends[np.arange(len(parts))[:, None, None] >= last] = 1.0
    begins = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    where = (
        np.arange(len(parts))[:, None, None],
        np.arange(parts.shape[1])[None, :, None],
        np.maximum(table.logical_of, 0),
    )
    return begins[where], ends[where]


Floats = NDArray[np.float64]

NO_HOST = HostCost(step_ns=0, sequence_ns=0)


class ExpertGate(Protocol):
    """Draws the experts of tokens; `cost.gate.PopularityGate` implements it."""

    def count(self, tokens: Keys, layers: range) -> Int64s:
        """Return how many of the tokens visit each expert, int64[len(layers), experts]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deployment:
    """Workers of a group, and the prices of their stages.

    Workers 0 .. num_ranks - 1 compute attention for their own requests. The table states which workers hold experts:
    the same ones in expert parallelism, later ones where attention and experts are disaggregated.

    Attributes:
        cost: prices of the stages.
        gate: draws the experts of each token. None means a dense network.
        table: slots of each worker.
        num_ranks: workers that compute attention.
        exchange: prices of the collectives.
        host: cost of the engine's own code in a step; the GPUs wait for it.
        slowdown: float64[workers], factor on the stage times of each worker. None means 1 for all.
        jitter: draws factors on stage times, in a given shape. None means 1 for all. A layer's micro-batches share
            their factor, so choosing their number gains nothing from luck.
        grouped_experts_ns: prices all experts of a worker in a layer as one grouped product, from the number of experts
            with rows and the number of rows, int64[...] each, ns. None means a product for each expert.
    """

    cost: StageCostModel
    gate: ExpertGate | None
    table: ExpertTable
    num_ranks: int
    exchange: Collective = FREE
    host: HostCost = NO_HOST
    slowdown: Floats | None = None
    jitter: Callable[[tuple[int, ...]], Floats] | None = None
    grouped_experts_ns: Callable[[Int64s, Int64s], Int64s] | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers of either kind."""
        return len(self.table.logical_of)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchTimes:
    """Stage times of a step that is cut into m micro-batches, ns. S counts layers with routed experts.

    Attributes:
        attention_ns: int64[m, ranks, S + 1]. Column s runs up to the gate of the s-th of these layers, with all dense
            layers before it. The last column is what follows the last experts, with the sampler.
        experts_ns: int64[m, workers, S], all experts of the worker in that layer, one after another.
        exchange_ns: int64[m, S], the collective before the experts, and again the one after them.
        overhead_ns: host, and collectives of dense layers.
    """

    attention_ns: Int64s
    experts_ns: Int64s
    exchange_ns: Int64s
    overhead_ns: int

    @property
    def lock_step_ns(self) -> int:
        """Duration of a step of one micro-batch, in which all workers meet before and after the experts of a layer."""
        attention, experts = self.attention_ns[0].max(axis=0), self.experts_ns[0].max(axis=0)
        return self.overhead_ns + int(attention.sum() + experts.sum() + 2 * self.exchange_ns.sum())

    @property
    def busy_ns(self) -> Int64s:
        """int64[workers], time for which each worker computes."""
        busy: Int64s = self.experts_ns.sum(axis=(0, 2))
        busy[: self.attention_ns.shape[1]] += self.attention_ns.sum(axis=(0, 2))
        return busy


@dataclass(frozen=True, slots=True, eq=False)
class KeyedBatch:
    """A rank's batch, and the keys of its tokens, by which their experts are drawn.

    Attributes:
        batch: the units.
        keys: uint64[tokens], keys of `core.work` of the units' concatenated tokens.
    """

    batch: Batch
    keys: Keys


class StepPricer:
    """Turns the batches of a step into stage times.

    Args:
        deployment: the group.
        num_segments: pieces into which each rank's batch is cut; numbers of micro-batches divide it.
    """

    def __init__(self, deployment: Deployment, num_segments: int) -> None:
        self.deployment, self.num_segments = deployment, num_segments
        network = deployment.cost.network
        self.groups = network.groups
        self.num_layers = network.num_layers
        self.sparse: Int64s = np.array(network.expert_layers, np.int64)
        self.column_starts: Int64s = np.append(0, self.sparse + 1)
        self.place(deployment.table)
        self.expert_prices = ExpertPrices(deployment.cost)
        # Sources matter only to what is exchanged and to the choice of a copy. Drawing for all at once is faster.
        self.joins_sources = deployment.exchange.is_free and not self.slots.has_copies

    def place(self, table: ExpertTable) -> None:
        """Compute the experts of coming steps where `table` has them; it has the shape of the deployment's table."""
        self.slots = SlotRows(table)
        self.holds_experts: NDArray[np.bool_] = self.slots.is_live.any(axis=(1, 2))

    def experts_ns(self, rows: Int64s) -> Int64s:
        """Price the experts of each worker and layer, int64[parts, workers, layers], from the rows of their slots."""
        grouped = self.deployment.grouped_experts_ns
        if grouped is not None:
            return grouped((rows > 0).sum(axis=-1), rows.sum(axis=-1))
        times: Int64s = self.expert_prices.of(rows).sum(axis=-1)
        return times

    def draw(self, batches: Sequence[KeyedBatch | None]) -> DrawnStep:
        """Draw the experts of a step's tokens; `batches` has an item for each rank, None for an idle one."""
        return DrawnStep(self, batches)


class DrawnStep:
    """One step of the group with drawn experts.

    Args:
        pricer: prices of the group.
        batches: batch of each rank; None means an idle rank, whose experts work for the others.

    Attributes:
        expert_counts: int64[layers, experts], tokens that visit each logical expert. None for a dense network.
        holds_experts: bool[workers], whether each worker holds experts.
    """

    def __init__(self, pricer: StepPricer, batches: Sequence[KeyedBatch | None]) -> None:
        deployment = pricer.deployment
        assert len(batches) == deployment.num_ranks, f"{len(batches)} batches for {deployment.num_ranks} ranks"
        self._pricer, self._batches = pricer, batches
        self.holds_experts = pricer.holds_experts
        num_tokens = np.array([0 if batch is None else len(batch.keys) for batch in batches], np.int64)
        # int64[ranks, segments + 1], first token of each segment of each rank
        self._cuts: Int64s = num_tokens[:, None] * np.arange(pricer.num_segments + 1) // pricer.num_segments
        self._counts = None if deployment.gate is None else self._draw(deployment.gate)
        self._factors = self._draw_factors()
        self.expert_counts: Int64s | None = None if self._counts is None else self._counts.sum(axis=(0, 1))

    @property
    def counts_by_source(self) -> Int64s | None:
        """int64[ranks, layers, experts], tokens of each rank that visit each expert; None for a dense network.

        A pricer that joins its sources has one row for all of them.
        """
        if self._counts is None:
            return None
        counts: Int64s = self._counts[0] if len(self._counts) == 1 else self._counts.sum(axis=0)
        return counts

    def micro_batches(self, num_parts: int) -> MicroBatchTimes:
        """Return the stage times of the step in `num_parts` micro-batches, a divisor of the number of segments."""
        pricer, deployment = self._pricer, self._pricer.deployment
        every, left = divmod(pricer.num_segments, num_parts)
        assert left == 0, f"{pricer.num_segments} segments do not make {num_parts} micro-batches"
        cuts = self._cuts[:, ::every]
        attention_ns = self._attention_ns(cuts)
        num_sparse, num_workers = len(pricer.sparse), deployment.num_workers
        experts_ns = np.zeros((num_parts, num_workers, num_sparse), np.int64)
        exchange_ns = np.zeros((num_parts, num_sparse), np.int64)
        if self._counts is not None:
            counts = self._counts
            if every > 1:
                counts = counts.reshape(num_parts, every, *counts.shape[1:]).sum(axis=1)
            rows = pricer.slots.rows(counts)[:, :, :, pricer.sparse]
            experts_ns = pricer.experts_ns(rows.sum(axis=1))
            if not deployment.exchange.is_free:
                sent, num_tokens = rows.sum(axis=-1), np.diff(cuts)
                for part in range(num_parts):
                    exchange_ns[part] = deployment.exchange.exchange_ns(sent[part], num_tokens[:, part])
        if self._factors is not None:
            attention_ns = np.rint(attention_ns * self._factors[0, : deployment.num_ranks]).astype(np.int64)
            experts_ns = np.rint(experts_ns * self._factors[1, :, :num_sparse]).astype(np.int64)
        return MicroBatchTimes(attention_ns, experts_ns, exchange_ns, self._overhead_ns())

    def _draw_factors(self) -> Floats | None:
        """float64[2, workers, S + 1], factors on attention and on experts."""
        deployment = self._pricer.deployment
        if deployment.slowdown is None and deployment.jitter is None:
            return None
        shape = (2, deployment.num_workers, len(self._pricer.sparse) + 1)
        factors = np.ones(shape) if deployment.jitter is None else deployment.jitter(shape)
        return factors if deployment.slowdown is None else factors * deployment.slowdown[:, None]

    def _draw(self, gate: ExpertGate) -> Int64s:
        """int64[segments, sources, layers, experts], tokens that visit each expert; one source if they are joined."""
        pricer = self._pricer
        layers = range(pricer.num_layers)
        keys = [np.empty(0, np.uint64) if batch is None else batch.keys for batch in self._batches]
        counts = np.zeros(
            (
                pricer.num_segments,
                1 if pricer.joins_sources else len(keys),
                pricer.num_layers,
                pricer.deployment.table.num_experts,
            ),
            np.int64,
        )
        for segment in range(pricer.num_segments):
            ends = self._cuts[:, segment : segment + 2].tolist()
            parts = [own[first:last] for own, (first, last) in zip(keys, ends, strict=True)]
            for source, tokens in enumerate([np.concatenate(parts)] if pricer.joins_sources else parts):
                if len(tokens):
                    counts[segment, source] = gate.count(tokens, layers)
        is_dense = np.ones(pricer.num_layers, np.bool_)
        is_dense[pricer.sparse] = False
        counts[:, :, is_dense] = 0
        return counts

    def _attention_ns(self, cuts: Int64s) -> Int64s:
        """int64[m, ranks, S + 1] as in `MicroBatchTimes`; `cuts` is int64[ranks, m + 1]."""
        pricer, cost = self._pricer, self._pricer.deployment.cost
        num_parts = cuts.shape[1] - 1
        by_layer = np.zeros((num_parts, len(self._batches), pricer.num_layers + 1), np.int64)
        for rank, keyed in enumerate(self._batches):
            if keyed is None:
                continue
            ends = keyed.batch.num_tokens.cumsum()
            for part, (first, last) in enumerate(zip(cuts[rank, :-1].tolist(), cuts[rank, 1:].tolist(), strict=True)):
                if first == last:
                    continue
                batch, num_ended = _part_of(keyed.batch, ends, first, last)
                for group in pricer.groups:
                    by_layer[part, rank, list(group.layers)] = cost.attention_ns(group.layers[0], batch)
                if num_ended:
                    by_layer[part, rank, -1] = cost.sample_ns(num_ended)
        columns: Int64s = np.add.reduceat(by_layer, pricer.column_starts, axis=-1)
        return columns

    def _overhead_ns(self) -> int:
        pricer, host = self._pricer, self._pricer.deployment.host
        num_dense = pricer.num_layers - len(pricer.sparse)
        slowest = 0
        for keyed in self._batches:
            if keyed is not None:
                collectives = num_dense * pricer.deployment.exchange.dense_layer_ns(len(keyed.keys))
                slowest = max(slowest, round(host.step_ns + host.sequence_ns * len(keyed.batch.start)) + collectives)
        return slowest


def _part_of(batch: Batch, ends: Int64s, first: int, last: int) -> tuple[Batch, int]:
    """Cut tokens `first` .. `last` - 1 out of a batch; also return how many units end there. A cut divides a unit."""
    if first == 0 and last == int(ends[-1]):
        return batch, len(ends)
    begins = ends - batch.num_tokens
    starts, stops = np.maximum(begins, first), np.minimum(ends, last)
    (rows,) = (starts < stops).nonzero()
    start = batch.start[rows] + (starts - begins)[rows]
    return Batch(start, (stops - starts)[rows]), int((ends[rows] <= last).sum())
