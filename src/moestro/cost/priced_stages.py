"""A device that works in stages without computing: it runs pieces one after the other at a cost model's prices.

A gate draws the experts that a token visits. The driver supplies the results of units: a script on virtual time, or the
responder of a paced device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np

from moestro.core.stages import (
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Merge,
    Merged,
    Passage,
    Sample,
    StageItem,
    StageResult,
    StageShape,
    Stopped,
)
from moestro.core.token_keys import Keys, request_keys, token_keys
from moestro.core.views import ATTENTION
from moestro.core.work import BlockMoves, Int32s, StepResult, Units
from moestro.cost.gate import DecodeChoices, PopularityGate
from moestro.cost.model import Batch, Int64s, StageCostModel
from moestro.cost.networks import NetworkShape

# (units, now_ns) -> their result; called once for every unit that reaches its end.
Answer = Callable[[Units, int], StepResult]
RequestKeys = Callable[[Units], Keys]  # units -> uint64[n], key of each unit's request


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Time that the engine's own code takes before an item can begin.

    The host prepares items one after another. Preparation is hidden while an earlier item is running.

    Attributes:
        attention_ns: for an `Attention`, a `Passage` or a `Sample`.
        expert_ns: for an `Experts`.
    """

    attention_ns: int = 0
    expert_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSetup:
    """One priced device.

    Attributes:
        shape: sizes of the device; `worker_shape` makes them.
        block_size: tokens of a KV block in the scheduler.
        gate: draws experts; None for a device without sparse attention layers.
        host: time of the engine's own code.
        factor: draws the factor on the time of an item. None means 1 for all.
    """

    shape: StageShape
    block_size: int
    gate: PopularityGate | None = None
    host: HostOverhead = HostOverhead()
    factor: Callable[[], float] | None = None


def whole_setup(
    cost: StageCostModel, num_tokens: int, block_size: int, gate: PopularityGate | None = None
) -> StageSetup:
    """Set up a device that has the whole network.

    Args:
        cost: prices of the stages.
        num_tokens: tokens that may be in the network at once.
        block_size: tokens of a KV block in the scheduler.
        gate: draws experts. None means the popularity of `cost` in all layers.
    """
    experts, popularity = cost.network.experts, cost.popularity
    shape = worker_shape(
        cost.network,
        num_rows=num_tokens,
        num_places=num_tokens,
        num_slots=experts.num_experts if experts else 0,
    )
    if gate is None and popularity is not None:
        gate = PopularityGate(popularity, shape.num_chosen)
    return StageSetup(shape=shape, block_size=block_size, gate=gate)


def worker_shape(
    network: NetworkShape, *, num_rows: int = 0, num_places: int = 0, num_slots: int = 0, num_guests: int = 0
) -> StageShape:
    """Make the sizes of a worker that has attention (rows and places), experts (slots and guests), or both."""
    is_sparse = [False] * network.num_layers
    for group in network.groups:
        for layer in group.layers:
            is_sparse[layer] = group.has_experts
    return StageShape(
        is_sparse=tuple(is_sparse),
        num_experts=num_slots,
        num_chosen=network.experts.top_k if network.experts else 0,
        num_rows=num_rows,
        num_places=num_places,
        num_guests=num_guests,
    )


@dataclass(slots=True, eq=False)
class _PricedItem:
    """An item in progress.

    Attributes:
        may_start_ns: when the host has prepared the item and all earlier copies are done.
        start_ns: start of its first piece, after the pieces of earlier items.
        ends_ns: end of each of p pieces, counted from `start_ns`.
        num_pieces: pieces that will run; fewer than p after a withdrawal.
        keys: uint64[tokens], keys of the tokens of a sparse `Attention` or `Passage`.
        stands: in a `Passage`: int64[p], layer * groups + group of each piece, with groups as in a `QueueTable`.
        counts: in a `Passage`: int64[num_layers, num_experts], tokens that visit each expert in its layers.
    """

    item: StageItem
    may_start_ns: int
    start_ns: int
    ends_ns: list[int]
    num_pieces: int
    keys: Keys | None = None
    stands: Int64s | None = None
    counts: Int64s | None = None

    @property
    def ready_ns(self) -> int:
        """End of its last piece."""
        return self.start_ns + (self.ends_ns[self.num_pieces - 1] if self.num_pieces else 0)

    @property
    def is_cut(self) -> bool:
        """Whether a withdrawal removed pieces."""
        return self.num_pieces < len(self.ends_ns)


class _ExpertPrices(dict[int, int]):
    """Price of one expert by its number of rows; a price is computed once."""

    def __init__(self, cost: StageCostModel) -> None:
        super().__init__({0: 0})
        self._cost = cost

    def __missing__(self, num_rows: int) -> int:
        price = self[num_rows] = self._cost.expert_ns(num_rows)
        return price


class PricedStages:
    """A `core.stages.StagedDevice` on its driver's clock.

    A piece is one attention, one call of one expert, or the sampler. A piece that has begun ends; after a withdrawal no
    further piece begins. Merging contributions is part of the attention's price.

    Args:
        cost: prices of the pieces.
        setup: sizes of the device, its gate and its host.
        answer: supplier of the results of units behind the last layer; None for a device without attention.
        keys_of: supplier of the keys of requests, by which the gate draws experts; `Scripts.request_keys`. None
            makes keys of the units' serial numbers, which differ between engines.

    Attributes:
        shape: numbers of layers, experts, rows and places.
        works_when_polled: False.
        num_items: items whose end was taken in.
        busy_ns: their time, without the host's.
        late_ns: times from the end of each of them until `poll` returned it; 0 on virtual time.
        num_expert_calls: calls of one expert in these items; each reads the expert's weights once.
    """

    works_when_polled = False

    def __init__(
        self,
        cost: StageCostModel,
        setup: StageSetup,
        answer: Answer | None = None,
        keys_of: RequestKeys | None = None,
    ) -> None:
        self.shape = setup.shape
        self._num_groups = 1 + self.shape.num_experts
        self._cost, self._setup = cost, setup
        self._answer = answer
        self._request_keys = keys_of or _keys_of_serials
        self._expert_ns = _ExpertPrices(cost)
        self._decode_choices = DecodeChoices(setup.gate, self.shape.num_layers) if setup.gate else None
        self._launched: deque[_PricedItem] = deque()
        self._moved_at_ns = self.num_expert_calls = 0
        self.num_items = self.busy_ns = self.late_ns = 0
        self._host_free_ns = 0

    def launch(self, item: StageItem, now_ns: int) -> None:
        """Implement `StagedDevice.launch`."""
        host_ns = self._setup.host.expert_ns if isinstance(item, Experts) else self._setup.host.attention_ns
        self._host_free_ns = max(now_ns, self._host_free_ns) + host_ns
        may_start_ns = max(self._host_free_ns, self._moved_at_ns)
        start_ns = max(may_start_ns, self._launched[-1].ready_ns) if self._launched else may_start_ns
        keys = counts = stands = None
        match item:
            case Experts():
                ends_ns = list(accumulate(map(self._expert_ns.__getitem__, item.counts.tolist())))
            case Attention():
                ends_ns = [self._cost.attention_ns(item.layer, _batch(item.units))]
                keys = self._keys(item.units) if self.shape.is_sparse[item.layer] else None
            case Passage():
                keys = self._keys(item.units)
                counts = self._count(item, keys)
                ends_ns, stands = self._pieces(item, counts)
            case Merge():
                ends_ns = [0]  # a few kernels' worth; an attention's price contains it
            case Sample():
                ends_ns = [self._cost.sample_ns(len(item.units))]
        if self._setup.factor is not None:
            factor = self._setup.factor()
            ends_ns = [round(end_ns * factor) for end_ns in ends_ns]
        self._launched.append(_PricedItem(item, may_start_ns, start_ns, ends_ns, len(ends_ns), keys, stands, counts))

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Copy blocks beside the work in progress, which uses other blocks."""
        num_tokens = moves.num_blocks * self._setup.block_size
        self._moved_at_ns = max(now_ns, self._moved_at_ns) + self._cost.move_ns(num_tokens)

    def poll(self, now_ns: int) -> list[StageResult]:
        """Implement `StagedDevice.poll`."""
        results: list[StageResult] = []
        while self._launched and self._launched[0].ready_ns <= now_ns:
            launched = self._launched.popleft()
            self.num_items += 1
            self.busy_ns += launched.ready_ns - launched.start_ns
            self.late_ns += now_ns - launched.ready_ns
            self.num_expert_calls += self._num_expert_calls(launched)
            results.append(self._result(launched, now_ns))
        return results

    def withdraw(self, now_ns: int) -> None:
        """Implement `StagedDevice.withdraw`."""
        free_at_ns = self._launched[0].start_ns if self._launched else 0
        for launched in self._launched:
            launched.start_ns = max(launched.may_start_ns, free_at_ns)
            if isinstance(launched.item, Experts | Passage):
                launched.num_pieces = min(launched.num_pieces, _num_begun(launched, now_ns))
            free_at_ns = launched.ready_ns

    def ready_at_ns(self) -> int | None:
        """Implement `StagedDevice.ready_at_ns`."""
        return self._launched[0].ready_ns if self._launched else None

    def read_inputs(self, places: Int32s) -> None:
        """Implement `StagedDevice.read_inputs`: nothing is computed."""

    def store_inputs(self, places: Int32s, inputs: object) -> None:
        """Implement `StagedDevice.store_inputs`: nothing is computed."""

    def read_contributions(self, places: Int32s, choices: Int32s) -> None:
        """Implement `StagedDevice.read_contributions`: nothing is computed."""

    def store_contributions(self, places: Int32s, choices: Int32s, contributions: object) -> None:
        """Implement `StagedDevice.store_contributions`: nothing is computed."""

    # --- pieces -----------------------------------------------------------------------------------------------------

    def _keys(self, units: Units) -> Keys | None:
        """uint64[tokens], keys of the tokens, taken at launch because a driver may forget an aborted request."""
        if self._setup.gate is None:
            return None
        return token_keys(self._request_keys(units), units.start, units.num_tokens)

    def _count(self, item: Passage, keys: Keys | None) -> Int64s | None:
        if self._setup.gate is None or keys is None:
            return None
        counts = np.zeros((self.shape.num_layers, self.shape.num_experts), np.int64)
        layers = range(item.layer, min(item.until, self.shape.num_layers))
        counts[layers.start : layers.stop] = self._setup.gate.count(keys, layers)
        counts[~np.array(self.shape.is_sparse)] = 0
        return counts

    def _pieces(self, item: Passage, counts: Int64s | None) -> tuple[list[int], Int64s]:
        """End of each piece of a passage, and int64[p], its place."""
        first, last = item.layer, min(item.until, self.shape.num_layers)
        prices = np.zeros((last - first, self._num_groups), np.int64)
        prices[:, ATTENTION] = self._attention_ns(_batch(item.units))[first:last]
        exists = prices > 0
        exists[:, ATTENTION] = True
        if counts is not None:
            inside = counts[first:last]
            num_rows, which = np.unique(inside, return_inverse=True)
            priced = [self._expert_ns[rows] for rows in num_rows.tolist()]
            prices[:, ATTENTION + 1 :] = np.array(priced, np.int64)[which].reshape(inside.shape)
            exists[:, ATTENTION + 1 :] = inside > 0
        durations, stands = prices[exists], np.flatnonzero(exists) + first * self._num_groups
        if item.until > self.shape.num_layers:
            durations = np.append(durations, self._cost.sample_ns(len(item.units)))
            stands = np.append(stands, self.shape.num_layers * self._num_groups)
        return durations.cumsum().tolist(), stands

    def _attention_ns(self, batch: Batch) -> Int64s:
        """int64[num_layers], attention time of each layer; layers of a group are alike."""
        attention_ns = np.empty(self.shape.num_layers, np.int64)
        for group in self._cost.network.groups:
            attention_ns[list(group.layers)] = self._cost.attention_ns(group.layers[0], batch)
        return attention_ns

    # --- results ----------------------------------------------------------------------------------------------------

    def _num_expert_calls(self, launched: _PricedItem) -> int:
        """Count the pieces of an item that ran and that are calls of one expert."""
        if launched.stands is not None:
            return int(np.count_nonzero(launched.stands[: launched.num_pieces] % self._num_groups))
        return launched.num_pieces if isinstance(launched.item, Experts) else 0

    def _result(self, launched: _PricedItem, now_ns: int) -> StageResult:
        match launched.item:
            case Experts():
                return ExpertsDone(launched.num_pieces)
            case Attention(layer=layer, units=units):
                return AttentionDone(self._chosen(launched, units, layer))
            case Merge():
                return Merged()
            case Sample(units=units):
                return self._answered(units, now_ns, None)
            case Passage() as item:
                return self._passed(launched, item, now_ns)

    def _passed(self, launched: _PricedItem, item: Passage, now_ns: int) -> StageResult:
        if launched.is_cut:
            return self._stopped(launched, item.units)
        if item.until > self.shape.num_layers:
            return self._answered(item.units, now_ns, launched.counts)
        return Stopped(item.until, None, 0, launched.counts)

    def _answered(self, units: Units, now_ns: int, counts: Int64s | None) -> StepResult:
        assert self._answer is not None, "a device without attention got units to sample"
        return msgspec.structs.replace(self._answer(units, now_ns), expert_counts=counts)

    def _stopped(self, launched: _PricedItem, units: Units) -> Stopped:
        """Describe a withdrawn passage: it stopped before the first piece that did not run."""
        assert launched.stands is not None, "only a passage stops"
        layer, group = divmod(int(launched.stands[launched.num_pieces]), self._num_groups)
        first_open, counts = max(group - 1, 0), launched.counts
        if counts is not None:
            counts[layer : layer + 1, first_open:] = 0
            counts[layer + 1 :] = 0
        chosen = None if group == ATTENTION else self._chosen(launched, units, layer)
        return Stopped(layer, chosen, first_open, counts)

    def _chosen(self, launched: _PricedItem, units: Units, layer: int) -> Int32s | None:
        keys, gate = launched.keys, self._setup.gate
        if gate is None or keys is None or not self.shape.is_sparse[layer]:
            return None
        if self._decode_choices is not None and len(keys) == len(units):
            return self._decode_choices.choose(units.slot, keys, layer)
        return gate.choose(keys, layer)


def _num_begun(launched: _PricedItem, now_ns: int) -> int:
    """Pieces that began before `now_ns`: each begins where the one before it ends."""
    ran_ns, num_pieces = now_ns - launched.start_ns, len(launched.ends_ns)
    if ran_ns <= 0 or not num_pieces:
        return 0
    return 1 + bisect_left(launched.ends_ns, ran_ns, 0, num_pieces - 1)


def _batch(units: Units) -> Batch:
    return Batch(units.start, units.num_tokens)


def _keys_of_serials(units: Units) -> Keys:
    return request_keys(units.serial)
