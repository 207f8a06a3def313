"""A device that works in stages without computing: it runs pieces one after the other at a cost model's prices.

A gate draws the experts that a token visits. The driver supplies the results of units: a script on virtual time, or the
responder of a paced device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.core.stages import (
    NUM_PLANS,
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Passage,
    Sample,
    StageItem,
    StageResult,
    StageShape,
    Stopped,
)
from moestro.core.views import ATTENTION
from moestro.core.work import BlockMoves, StepResult, Units
from moestro.cost.gate import PopularityGate, token_keys
from moestro.cost.model import Batch, Int64s, StageCostModel
from moestro.cost.networks import NetworkShape

# (units, now_ns) -> their result; called once for every unit that reaches its end.
Answer = Callable[[Units, int], StepResult]

_NOWHERE = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class _PricedItem:
    """An item in progress.

    Attributes:
        may_start_ns: when the item was launched and all earlier copies are done.
        start_ns: start of its first piece, after the pieces of earlier items.
        ends_ns: int64[p], end of each piece, counted from `start_ns`.
        num_pieces: pieces that will run; fewer than p after a withdrawal.
        stands: in a `Passage`: int64[p], layer * groups + group of each piece, with groups as in a `QueueTable`.
        counts: in a `Passage`: int64[num_layers, num_experts], tokens that visit each expert in its layers.
    """

    item: StageItem
    may_start_ns: int
    start_ns: int
    ends_ns: Int64s
    num_pieces: int
    stands: Int64s
    counts: Int64s | None

    @property
    def ready_ns(self) -> int:
        """End of its last piece."""
        return self.start_ns + (int(self.ends_ns[self.num_pieces - 1]) if self.num_pieces else 0)

    @property
    def is_cut(self) -> bool:
        """Whether a withdrawal removed pieces."""
        return self.num_pieces < len(self.ends_ns)


class PricedStages:
    """A `core.stages.StagedDevice` on its driver's clock.

    A piece is one attention, one call of one expert, or the sampler. A piece that has begun ends; after a withdrawal no
    further piece begins.

    Args:
        cost: prices of the pieces.
        max_tokens: tokens of one plan; twice as many may be inside the network.
        block_size: tokens of a KV block in the scheduler.
        answer: supplier of the results of units behind the last layer.

    Attributes:
        shape: numbers of layers, experts, rows and places.
        works_when_polled: False.
    """

    works_when_polled = False

    def __init__(self, cost: StageCostModel, max_tokens: int, block_size: int, answer: Answer) -> None:
        self.shape = _shape_of(cost.network, NUM_PLANS * max_tokens)
        self._num_groups = 1 + self.shape.num_experts
        self._cost = cost
        self._answer = answer
        popularity = cost.popularity
        self._gate = None if popularity is None else PopularityGate(popularity, self.shape.num_chosen)
        self._launched: deque[_PricedItem] = deque()
        self._block_size = block_size
        self._moved_at_ns = 0

    def launch(self, item: StageItem, now_ns: int) -> None:
        """Implement `StagedDevice.launch`."""
        counts: Int64s | None = None
        stands = _NOWHERE
        match item:
            case Attention():
                durations = np.array([self._cost.attention_ns(item.layer, _batch(item.units))])
            case Experts():
                prices = [self._cost.expert_ns(num_rows) for num_rows in item.counts.tolist()]
                durations = np.array(prices, np.int64)
            case Passage():
                counts = self._count(item)
                durations, stands = self._pieces(item, counts)
            case Sample():
                durations = np.array([self._cost.sample_ns(len(item.units))])
        may_start_ns = max(now_ns, self._moved_at_ns)
        start_ns = max(may_start_ns, self._launched[-1].ready_ns) if self._launched else may_start_ns
        ends_ns = durations.cumsum()
        self._launched.append(_PricedItem(item, may_start_ns, start_ns, ends_ns, len(ends_ns), stands, counts))

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Copy blocks beside the work in progress, which uses other blocks."""
        self._moved_at_ns = max(now_ns, self._moved_at_ns) + self._cost.move_ns(moves.num_blocks * self._block_size)

    def poll(self, now_ns: int) -> list[StageResult]:
        """Implement `StagedDevice.poll`."""
        results: list[StageResult] = []
        while self._launched and self._launched[0].ready_ns <= now_ns:
            results.append(self._result(self._launched.popleft(), now_ns))
        return results

    def withdraw(self, now_ns: int) -> None:
        """Implement `StagedDevice.withdraw`."""
        free_at_ns = self._launched[0].start_ns if self._launched else 0
        for launched in self._launched:
            launched.start_ns = max(launched.may_start_ns, free_at_ns)
            if isinstance(launched.item, Experts | Passage):
                begins_ns = launched.start_ns + np.append(0, launched.ends_ns[:-1])
                num_begun = int(np.searchsorted(begins_ns, now_ns)) if len(launched.ends_ns) else 0
                launched.num_pieces = min(launched.num_pieces, num_begun)
            free_at_ns = launched.ready_ns

    def ready_at_ns(self) -> int | None:
        """Implement `StagedDevice.ready_at_ns`."""
        return self._launched[0].ready_ns if self._launched else None

    # --- pieces -----------------------------------------------------------------------------------------------------

    def _count(self, item: Passage) -> Int64s | None:
        if self._gate is None:
            return None
        counts = np.zeros((self.shape.num_layers, self.shape.num_experts), np.int64)
        layers = range(item.layer, min(item.until, self.shape.num_layers))
        counts[layers.start : layers.stop] = self._gate.count(token_keys(item.units), layers)
        counts[~np.array(self.shape.is_sparse)] = 0
        return counts

    def _pieces(self, item: Passage, counts: Int64s | None) -> tuple[Int64s, Int64s]:
        """int64[p], int64[p]: duration and place of each piece of a passage."""
        first, last = item.layer, min(item.until, self.shape.num_layers)
        prices = np.zeros((last - first, self._num_groups), np.int64)
        prices[:, ATTENTION] = self._attention_ns(_batch(item.units))[first:last]
        exists = prices > 0
        exists[:, ATTENTION] = True
        if counts is not None:
            inside = counts[first:last]
            num_rows, which = np.unique(inside, return_inverse=True)
            priced = [self._cost.expert_ns(rows) if rows else 0 for rows in num_rows.tolist()]
            prices[:, ATTENTION + 1 :] = np.array(priced, np.int64)[which].reshape(inside.shape)
            exists[:, ATTENTION + 1 :] = inside > 0
        durations, stands = prices[exists], np.flatnonzero(exists) + first * self._num_groups
        if item.until > self.shape.num_layers:
            durations = np.append(durations, self._cost.sample_ns(len(item.units)))
            stands = np.append(stands, self.shape.num_layers * self._num_groups)
        return durations, stands

    def _attention_ns(self, batch: Batch) -> Int64s:
        """int64[num_layers], attention time of each layer; layers of a group are alike."""
        attention_ns = np.empty(self.shape.num_layers, np.int64)
        for group in self._cost.network.groups:
            attention_ns[list(group.layers)] = self._cost.attention_ns(group.layers[0], batch)
        return attention_ns

    # --- results ----------------------------------------------------------------------------------------------------

    def _result(self, launched: _PricedItem, now_ns: int) -> StageResult:
        match launched.item:
            case Attention(layer, units):
                return AttentionDone(self._chosen(units, layer))
            case Experts():
                return ExpertsDone(launched.num_pieces)
            case Sample(units):
                return msgspec.structs.replace(self._answer(units, now_ns), expert_counts=None)
            case Passage() as item:
                if launched.is_cut:
                    return self._stopped(launched, item.units)
                if item.until > self.shape.num_layers:
                    return msgspec.structs.replace(self._answer(item.units, now_ns), expert_counts=launched.counts)
                return Stopped(item.until, None, 0, launched.counts)

    def _stopped(self, launched: _PricedItem, units: Units) -> Stopped:
        """Describe a withdrawn passage: it stopped before the first piece that did not run."""
        layer, group = divmod(int(launched.stands[launched.num_pieces]), self._num_groups)
        first_open, counts = max(group - 1, 0), launched.counts
        if counts is not None:
            counts[layer : layer + 1, first_open:] = 0
            counts[layer + 1 :] = 0
        chosen = None if group == ATTENTION else self._chosen(units, layer)
        return Stopped(layer, chosen, first_open, counts)

    def _chosen(self, units: Units, layer: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]] | None:
        if self._gate is None or not self.shape.is_sparse[layer]:
            return None
        return self._gate.choose(token_keys(units), layer)


def _batch(units: Units) -> Batch:
    return Batch(units.start, units.num_tokens)


def _shape_of(network: NetworkShape, num_tokens: int) -> StageShape:
    """Shape with as many rows and places as tokens may be inside."""
    is_sparse = [False] * network.num_layers
    for group in network.groups:
        for layer in group.layers:
            is_sparse[layer] = group.has_experts
    return StageShape(
        is_sparse=tuple(is_sparse),
        num_experts=network.experts.num_experts if network.experts else 0,
        num_chosen=network.experts.top_k if network.experts else 0,
        num_rows=num_tokens,
        num_places=num_tokens,
    )
