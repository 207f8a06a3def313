"""Devices on virtual time: they compute nothing, take the time that a cost model says, and answer from scripts.

A script is the hidden future of a replayed request (`core.script.Script`). The scheduler knows where the answer ends
(`Scheduler.add`); a device adds the hashes of the blocks that the answer fills. These depend on the *position* at which
a unit ends, never on how often the sequence was computed. A preempted sequence is recomputed with its generated tokens
as part of its prompt, and continues at the same place.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from moestro.core.columns import true_rows
from moestro.core.hashing import HASH_BYTES
from moestro.core.script import Script
from moestro.core.token_keys import Keys, request_key, token_keys
from moestro.core.work import BlockMoves, Forward, Int32s, Slots, StepResult, Units
from moestro.cost.model import Batch, CostModel, Int64s, Ints
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
