"""Devices on virtual time: they compute nothing, take the time that a cost model says, and answer from scripts.

A script is the hidden future of a replayed request (`core.request.Script`). The scheduler knows where the answer ends
(`Scheduler.add`); a device adds the hashes of the blocks that the answer fills. These depend on the *position* at which
a unit ends, never on how often the sequence was computed. A preempted sequence is recomputed with its generated tokens
as part of its prompt, and continues at the same place.

A device in stages runs pieces one after the other, and a gate draws the experts that a token visits. The driver
supplies the results of units: a script on virtual time, or the responder of a paced device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np

from moestro.core.hashing import HASH_BYTES
from moestro.core.request import Script
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
from moestro.core.views import ATTENTION, true_rows
from moestro.core.work import (
    BlockMoves,
    Forward,
    Int32s,
    Keys,
    Slots,
    StepResult,
    Units,
    request_key,
    request_keys,
    token_keys,
)
from moestro.cost.gate import DecodeChoices, PopularityGate
from moestro.cost.model import Batch, CostModel, Int64s, Ints, StageCostModel
from moestro.cost.networks import NetworkShape
from moestro.errors import InvariantError

_NEVER = np.iinfo(np.int32).max
_NO_SEQUENCE = -1


class _Progress(msgspec.Struct, eq=False, gc=False):
    """A script and the progress of its sequence.

    Attributes:
        num_prompt_tokens: prompt length.
        num_hashes_reported: reported hashes of `script.block_hashes`. A recomputed block is not reported again.
        slot: index of the sequence's columns.
    """

    script: Script
    num_prompt_tokens: int
    num_hashes_reported: int = 0
    slot: int = _NO_SEQUENCE


class Scripts:
    """Futures of sequences: the result of each unit, independent of time.

    Args:
        block_size: tokens of a KV block in the scheduler.

    Attributes:
        num_naming: scripts with names for blocks. Without any, there is nothing to look up.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._progress: dict[int, _Progress] = {}
        self.num_naming = 0
        # Columns by slot; each holds the sequence that was last computed there.
        self._serial: Int64s = np.full(16, _NO_SEQUENCE, np.int64)
        self._fills_at: Int32s = np.full(16, _NEVER, np.int32)  # tokens with KV at which the next named block is full
        self._request_key: Keys = np.zeros(16, np.uint64)

    # --- scripts ----------------------------------------------------------------------------------------------------

    def expect(self, serial: int, script: Script, num_prompt_tokens: int) -> None:
        """Set the script of the sequence `serial` (from `Rank.add`) before the launch of its first unit."""
        if serial in self._progress:
            raise InvariantError(f"sequence {serial} has a script already")
        self._progress[serial] = _Progress(script, num_prompt_tokens)
        self.num_naming += bool(script.block_hashes)

    def forget(self, serial: int) -> None:
        """Drop the script of a sequence that ended. Call it for every sequence; unknown serials are ignored."""
        progress = self._progress.pop(serial, None)
        if progress is None:
            return
        self.num_naming -= bool(progress.script.block_hashes)
        if progress.slot != _NO_SEQUENCE and self._serial[progress.slot] == serial:
            self._serial[progress.slot], self._fills_at[progress.slot] = _NO_SEQUENCE, _NEVER

    def request_keys(self, units: Units) -> Keys:
        """uint64[n], key of each unit's request: its script's, or one made from its serial number."""
        self._bind(units.slot, units.serial)
        keys: Keys = self._request_key[units.slot]
        return keys

    def token_keys(self, units: Units) -> Keys:
        """uint64[tokens], key of each token of `units` in order, by which a `PopularityGate` draws its experts."""
        return token_keys(self.request_keys(units), units.start, units.num_tokens)

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self, units: Units) -> StepResult:
        """Result of computing `units`, each of them once."""
        if not self.num_naming:
            return StepResult(units.slot)
        self._bind(units.slot, units.serial)
        return StepResult(units.slot, block_hashes=self._filled(units.slot, units.start + units.num_tokens))

    def _filled(self, slots: Slots, end: Int32s) -> dict[int, bytes]:
        """By row, unreported hashes of the generated blocks that are full with `end` tokens."""
        found = {}
        for row in true_rows(end >= self._fills_at[slots]):
            progress = self._progress[int(self._serial[slots[row]])]
            reported, size = progress.num_hashes_reported, self._block_size
            full = int(end[row]) // size - progress.num_prompt_tokens // size
            found[row] = progress.script.block_hashes[reported * HASH_BYTES : full * HASH_BYTES]
            progress.num_hashes_reported += len(found[row]) // HASH_BYTES
            self._load(progress)
        return found

    def _bind(self, slots: Slots, serials: Int64s) -> None:
        """Load the columns of slots whose sequence has changed."""
        self._cover(slots)
        for row in true_rows(self._serial[slots] != serials):
            slot, serial = int(slots[row]), int(serials[row])
            progress = self._progress.get(serial)
            if progress is None:
                raise InvariantError(
                    f"no script for sequence {serial}: call expect() before its first unit is launched"
                )
            if progress.slot != _NO_SEQUENCE and self._serial[progress.slot] == serial:
                # Preempted and resumed elsewhere: only one slot holds it.
                self._serial[progress.slot], self._fills_at[progress.slot] = _NO_SEQUENCE, _NEVER
            progress.slot = slot
            self._serial[slot] = serial
            key = progress.script.request_key
            self._request_key[slot] = request_key(serial) if key is None else key
            self._load(progress)

    def _cover(self, slots: Slots) -> None:
        """Have columns for `slots`."""
        added = max(slots.tolist()) + 1 - len(self._serial)
        if added > 0:
            added += len(self._serial)
            self._serial = np.append(self._serial, np.full(added, _NO_SEQUENCE, np.int64))
            self._fills_at = np.append(self._fills_at, np.full(added, _NEVER, np.int32))
            self._request_key = np.append(self._request_key, np.zeros(added, np.uint64))

    def _load(self, progress: _Progress) -> None:
        """Write when the next named block of a sequence is full."""
        script, size, reported = progress.script, self._block_size, progress.num_hashes_reported
        next_at = (progress.num_prompt_tokens // size + reported + 1) * size
        self._fills_at[progress.slot] = next_at if reported * HASH_BYTES < len(script.block_hashes) else _NEVER


class ScriptedDevice(Scripts):
    """Answers `Forward` items from scripts; its driver sets the end of each item.

    The driver of ranks in lock-step owns the barrier: each rank launches on such a device, and the driver prices
    the step of the whole group and calls `finish_at`. A rank on its own uses a `PricedDevice`.

    Args:
        block_size: tokens of a KV block in the scheduler.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._launched: tuple[Batch, StepResult] | None = None
        self._num_kept = self._num_restored = 0

    # --- Device -----------------------------------------------------------------------------------------------------

    def launch(self, item: Forward, now_ns: int) -> None:
        """Accept `item`. `batch` then describes its cost, and the driver must call `finish_at`."""
        if self._launched is not None:
            raise InvariantError("launched twice without finish_at: the first item has no end yet")
        units = item.units
        self._launched = (Batch(units.start, units.num_tokens), self.answer(units))

    @property
    def batch(self) -> Batch | None:
        """The launched item that has no end yet, or None."""
        return None if self._launched is None else self._launched[0]

    def finish_at(self, ready_ns: int) -> None:
        """Set the end of the launched item."""
        if self._launched is None:
            raise InvariantError("finish_at without a launched item")
        self._pending.append((ready_ns, self._launched[1]))
        self._launched = None

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Count the copied blocks. The driver prices them with the next item."""
        self._num_kept += moves.kept.shape[1] * self._block_size
        self._num_restored += moves.restored.shape[1] * self._block_size

    def take_num_moved(self) -> tuple[int, int]:
        """Tokens whose KV was copied to the host and back since the last call, in whole blocks."""
        num_moved = self._num_kept, self._num_restored
        self._num_kept = self._num_restored = 0
        return num_moved

    def poll(self, now_ns: int) -> list[StepResult]:
        """Implement `Device.poll`."""
        ready = []
        while self._pending and self._pending[0][0] <= now_ns:
            ready.append(self._pending.popleft()[1])
        return ready

    def ready_at_ns(self) -> int | None:
        """Implement `Device.ready_at_ns`; None also while a launched item has no end yet."""
        return self._pending[0][0] if self._pending else None

    # --- many steps at once ----------------------------------------------------------------------------------------

    def filled_blocks(self, slots: Slots, num_computed: Int32s, num_steps: int) -> dict[int, bytes]:
        """By slot, packed hashes of the generated blocks that fill up in `num_steps` decode steps.

        Args:
            slots: int64[n], n > 0, slots of the scheduler's running sequences, with nothing in flight.
            num_computed: int32[n], their tokens with KV.
        """
        self._cover(slots)
        return {int(slots[row]): packed for row, packed in self._filled(slots, num_computed + num_steps).items()}


class PricedDevice(ScriptedDevice):
    """A `core.work.Device` on virtual time: it runs items one after the other at the cost model's prices.

    Args:
        cost: prices of the items.
        block_size: tokens of a KV block in the scheduler.
    """

    def __init__(self, cost: CostModel, block_size: int) -> None:
        super().__init__(block_size)
        self.cost = cost
        self._free_at_ns = 0

    def launch(self, item: Forward, now_ns: int) -> None:
        """Implement `Device.launch`."""
        super().launch(item, now_ns)
        assert self.batch is not None, "launch leaves a batch"
        price_ns = self.cost.step_ns(self.batch) + self.cost.move_ns(sum(self.take_num_moved()))
        self._free_at_ns = max(now_ns, self._free_at_ns) + price_ns
        self.finish_at(self._free_at_ns)

    def decode_steps_ns(self, num_computed: Ints, num_steps: int) -> Int64s:
        """int64[num_steps], time of each of the next decode steps, as in `CostModel.decode_steps_ns`."""
        return self.cost.decode_steps_ns(num_computed, num_steps)


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
    network: NetworkShape, *, num_rows: int = 0, num_places: int = 0, num_slots: int = 0, num_remote_places: int = 0
) -> StageShape:
    """Make the sizes of a worker that has attention (rows and places), experts (slots and remote places), or both."""
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
        num_remote_places=num_remote_places,
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
