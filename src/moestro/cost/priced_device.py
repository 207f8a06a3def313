"""Devices on virtual time: they compute nothing, take the time that a cost model says, and answer from scripts.

A script is the hidden future of a replayed request (`core.script.Script`): its answer's length, and the hashes of the
blocks that the answer fills. The result of a unit depends on the *position* at which the unit ends, never on how often
the sequence was computed. A preempted sequence is recomputed with its generated tokens as part of its prompt, and
continues at the same place.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from moestro.core.columns import SHORT, has_true, true_rows
from moestro.core.hashing import HASH_BYTES
from moestro.core.script import Script
from moestro.core.token_keys import Keys, request_key, token_keys
from moestro.core.work import LOGITS_LAST, BlockMoves, Forward, Int32s, Slots, StepResult, Units
from moestro.cost.model import Batch, CostModel, Int64s, Ints
from moestro.errors import InvariantError

_NEVER = np.iinfo(np.int32).max
_NOBODY = -1


class _Progress(msgspec.Struct, eq=False, gc=False):
    """A script and the progress of its sequence.

    Attributes:
        num_prompt_tokens: prompt length; 0 until the first token of the answer reveals it.
        num_hashes_told: hashes of `script.block_hashes` that were reported; a recomputed block is not reported again.
        slot: index of the sequence's columns.
    """

    script: Script
    slot: int = _NOBODY
    num_prompt_tokens: int = 0
    num_hashes_told: int = 0


class Scripts:
    """Futures of sequences: the result of each unit, independent of time.

    Args:
        block_size: tokens of a KV block in the scheduler.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._progress: dict[int, _Progress] = {}
        # Columns by slot; each holds the sequence that was last computed there.
        self._serial: Int64s = np.full(16, _NOBODY, np.int64)
        self._borders = np.zeros((2, 16), np.int32)
        self._ends_at: Int32s = self._borders[0]  # tokens with KV at which the last token is sampled
        self._fills_at: Int32s = self._borders[1]  # tokens with KV at which the next generated block is full
        self._request_key: Keys = np.zeros(16, np.uint64)

    # --- scripts ----------------------------------------------------------------------------------------------------

    def expect(self, serial: int, script: Script) -> None:
        """Set the script of the sequence `serial` (from `Rank.add`) before the launch of its first unit."""
        if serial in self._progress:
            raise InvariantError(f"sequence {serial} has a script already")
        self._progress[serial] = _Progress(script)

    def forget(self, serial: int) -> None:
        """Drop the script of a sequence that ended. Call it for every sequence; unknown serials are ignored.

        A script that reaches its end drops itself, but only the scheduler knows of aborts and of `max_tokens`.
        """
        self._progress.pop(serial, None)

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
        slots = units.slot
        self._bind(slots, units.serial)
        end = units.start + units.num_tokens
        reached = end >= self._borders.take(slots, axis=1)
        finished = reached[0]  # of two rows; to unpack them takes as long as all the rest
        block_hashes = {}
        if has_true(reached):
            # A sequence with an unknown prompt length appears here too: its first token reveals the length.
            for row in true_rows(finished):
                samples = int(units.logits[row]) & LOGITS_LAST
                finished[row] = bool(samples) and self._sample(int(slots[row]), int(end[row]))
            for row in true_rows(reached[1]):
                packed = self._fill(int(slots[row]), int(end[row]))
                if packed:
                    block_hashes[row] = packed
            for row in true_rows(finished):
                self.forget(int(units.serial[row]))
        return StepResult(slots, finished=finished, block_hashes=block_hashes)

    def _bind(self, slots: Slots, serials: Int64s) -> None:
        """Load the columns of slots whose sequence has changed."""
        largest = max(slots.tolist())
        if largest >= len(self._serial):
            self._grow(2 * largest + 2)
        for row in true_rows(self._serial[slots] != serials):
            slot, serial = int(slots[row]), int(serials[row])
            progress = self._progress.get(serial)
            if progress is None:
                raise InvariantError(
                    f"no script for sequence {serial}: call expect() before its first unit is launched"
                )
            if progress.slot != _NOBODY and self._serial[progress.slot] == serial:
                self._serial[progress.slot] = _NOBODY  # preempted and resumed elsewhere: only one slot holds it
            progress.slot = slot
            self._serial[slot] = serial
            key = progress.script.request_key
            self._request_key[slot] = request_key(serial) if key is None else key
            self._load(progress)

    def _grow(self, num_slots: int) -> None:
        added = num_slots - len(self._serial)
        self._serial = np.append(self._serial, np.full(added, _NOBODY, np.int64))
        self._borders = np.append(self._borders, np.zeros((2, added), np.int32), axis=1)
        self._ends_at, self._fills_at = self._borders
        self._request_key = np.append(self._request_key, np.zeros(added, np.uint64))

    def _load(self, progress: _Progress) -> None:
        """Write the columns of the sequence's slot."""
        slot, prompt, script, size = progress.slot, progress.num_prompt_tokens, progress.script, self._block_size
        self._ends_at[slot] = prompt + script.num_output_tokens - 1 if prompt else 0
        left = len(script.block_hashes) // HASH_BYTES - progress.num_hashes_told
        next_block = prompt // size + progress.num_hashes_told
        self._fills_at[slot] = (next_block + 1) * size if prompt and left else _NEVER

    def _sample(self, slot: int, end: int) -> bool:
        """Sample a token with `end` tokens known. Returns whether the token is the script's last."""
        progress = self._progress[int(self._serial[slot])]
        if not progress.num_prompt_tokens:
            progress.num_prompt_tokens = end
            self._load(progress)
        return end >= int(self._ends_at[slot])

    def _fill(self, slot: int, end: int) -> bytes:
        """Unreported hashes of the generated blocks that are full with `end` tokens."""
        progress = self._progress[int(self._serial[slot])]
        told, size = progress.num_hashes_told, self._block_size
        full = end // size - progress.num_prompt_tokens // size
        packed = progress.script.block_hashes[told * HASH_BYTES : full * HASH_BYTES]
        progress.num_hashes_told += len(packed) // HASH_BYTES
        self._load(progress)
        return packed


class ScriptedDevice(Scripts):
    """Answers `Forward` items from scripts; its driver sets the end of each item.

    The driver of ranks in lock-step owns the barrier: each rank launches on such a device, and the driver prices
    the step of the whole group and calls `finish_at`. A rank on its own uses a `PricedDevice`.

    Args:
        block_size: tokens of a KV block in the scheduler.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        # The `num_computed` of the last `steps_until_finish`, and the steps from there to the borders of each slot.
        self._looked_at: Int32s | None = None
        self._left = np.empty((2, 0), np.int32)
        self._nearest = 0  # the least of these steps
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._launched: tuple[Batch, StepResult] | None = None
        self._num_moved = 0

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
        """Count the copied blocks. The price of the next item includes them."""
        self._num_moved += moves.num_blocks * self._block_size

    def take_num_moved(self) -> int:
        """Tokens whose KV was copied since the last call, in whole blocks."""
        num_moved, self._num_moved = self._num_moved, 0
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

    def steps_until_finish(self, slots: Slots, num_computed: Int32s) -> int:
        """Decode steps up to and including the first that ends a script; 0 if only the next step can tell.

        Args:
            slots: int64[n], slots of the scheduler's running sequences, with nothing in flight.
            num_computed: int32[n], their tokens with KV.
        """
        if len(slots) == 0:
            return 0
        try:
            left = self._borders.take(slots, axis=1)
        except IndexError:
            return 0  # a slot without any launch so far
        left -= num_computed
        rows = left.tolist() if len(slots) <= SHORT else np.minimum.reduce(left, axis=1, keepdims=True).tolist()
        until_end, until_fill = int(min(rows[0])), int(min(rows[1]))
        self._looked_at, self._left, self._nearest = num_computed, left, min(until_end, until_fill)
        return max(until_end, 0)

    def complete_steps(self, slots: Slots, num_computed: Int32s, num_steps: int) -> tuple[dict[int, bytes], list[int]]:
        """Apply the effect of `num_steps` decode steps, at most `steps_until_finish`.

        Returns:
            The arguments of `DecodeJumps.advance`: by slot, the packed hashes of the generated blocks that fill up; and
            the slots whose scripts end in the last step.
        """
        if self._looked_at is not num_computed:
            left = self._borders.take(slots, axis=1) - num_computed
        elif num_steps < self._nearest:
            return {}, []
        else:
            left = self._left
        reached = left <= num_steps
        told = {}
        for row in true_rows(reached[1]):
            packed = self._fill(int(slots[row]), int(num_computed[row]) + num_steps)
            if packed:
                told[int(slots[row])] = packed
        finished = [int(slots[row]) for row in true_rows(reached[0])]
        for slot in finished:
            self.forget(int(self._serial[slot]))
        return told, finished


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
        price_ns = self.cost.step_ns(self.batch) + self.cost.move_ns(self.take_num_moved())
        self._free_at_ns = max(now_ns, self._free_at_ns) + price_ns
        self.finish_at(self._free_at_ns)

    def decode_steps_ns(self, num_computed: Ints, num_steps: int) -> Int64s:
        """int64[num_steps], time of each of the next decode steps, as in `CostModel.decode_steps_ns`."""
        return self.cost.decode_steps_ns(num_computed, num_steps)
