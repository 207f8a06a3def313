"""Devices on virtual time: they compute nothing, take as long as a cost model says, and answer from scripts.

A script is the hidden future of a replayed request (`core.script.Script`): how long its answer is, and the hashes of
the blocks that it fills. What a unit brings about depends on the *position* that it ends at, never on how often a
sequence was computed: a preempted sequence is recomputed, its generated tokens being prompt again, and goes on where it
was.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from moestro.core.columns import true_rows
from moestro.core.hashing import HASH_BYTES
from moestro.core.script import Script
from moestro.core.work import LOGITS_LAST, BlockMoves, Forward, Int32s, Slots, StepResult, Units
from moestro.cost.model import Batch, CostModel, Int64s, Ints
from moestro.errors import InvariantError

_NEVER = np.iinfo(np.int32).max
_NOBODY = -1


@dataclass(slots=True)
class _Progress:
    """A script and how far its sequence is.

    Attributes:
        num_prompt_tokens: 0 until the prompt is over for the first time, which says it.
        num_hashes_told: of `script.block_hashes`; a recomputed block is not told again.
        slot: where its columns are.
    """

    script: Script
    slot: int = _NOBODY
    num_prompt_tokens: int = 0
    num_hashes_told: int = 0


class Scripts:
    """The futures of sequences: what each unit brings about, whoever says when.

    Args:
        block_size: tokens of a KV block, the scheduler's.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._progress: dict[int, _Progress] = {}
        # Columns by slot, of the sequence that was last computed there.
        self._serial: Int64s = np.full(16, _NOBODY, np.int64)
        self._ends_at: Int32s = np.zeros(16, np.int32)  # tokens with KV at which its last token is sampled
        self._fills_at: Int32s = np.zeros(16, np.int32)  # ... at which the next generated block is full

    # --- scripts ----------------------------------------------------------------------------------------------------

    def expect(self, serial: int, script: Script) -> None:
        """Tell the future of the sequence `serial` (from `Rank.add`), before its first unit is launched."""
        if serial in self._progress:
            raise InvariantError(f"sequence {serial} has a script already")
        self._progress[serial] = _Progress(script)

    def forget(self, serial: int) -> None:
        """Drop the script of a sequence that ended; to be called for every one, unknown serials are ignored.

        A script that came to its end is dropped by itself, but only the scheduler knows of aborts and of `max_tokens`.
        """
        self._progress.pop(serial, None)

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self, units: Units) -> StepResult:
        """What becomes of `units` when they are computed, each of them once."""
        self._bind(units.slot, units.serial)
        end = units.start + units.num_tokens
        samples = (units.logits & LOGITS_LAST).view(np.bool_)
        finished = samples & (end >= self._ends_at.take(units.slot))
        # A sequence whose prompt's length is not known yet shows up here, too: its first token says it.
        for row in true_rows(finished):
            finished[row] = self._sample(int(units.slot[row]), int(end[row]))
        block_hashes = {}
        for row in true_rows(end >= self._fills_at.take(units.slot)):
            packed = self._fill(int(units.slot[row]), int(end[row]))
            if packed:
                block_hashes[row] = packed
        for row in true_rows(finished):
            self.forget(int(units.serial[row]))
        return StepResult(units.slot, finished=finished, block_hashes=block_hashes)

    def _bind(self, slots: Slots, serials: Int64s) -> None:
        """Load the columns of slots whose sequence has changed."""
        largest = int(slots.max())
        if largest >= len(self._serial):
            self._grow(2 * largest + 2)
        for row in true_rows(self._serial.take(slots) != serials):
            slot, serial = int(slots[row]), int(serials[row])
            progress = self._progress.get(serial)
            if progress is None:
                raise InvariantError(f"no script for sequence {serial}: the device was not told to expect it")
            if progress.slot != _NOBODY and self._serial[progress.slot] == serial:
                self._serial[progress.slot] = _NOBODY  # preempted, and back elsewhere: one place knows it
            progress.slot = slot
            self._serial[slot] = serial
            self._load(progress)

    def _grow(self, num_slots: int) -> None:
        added = num_slots - len(self._serial)
        self._serial = np.append(self._serial, np.full(added, _NOBODY, np.int64))
        self._ends_at = np.append(self._ends_at, np.zeros(added, np.int32))
        self._fills_at = np.append(self._fills_at, np.zeros(added, np.int32))

    def _load(self, progress: _Progress) -> None:
        """Write the columns of its slot."""
        slot, prompt, script, size = progress.slot, progress.num_prompt_tokens, progress.script, self._block_size
        self._ends_at[slot] = prompt + script.num_output_tokens - 1 if prompt else 0
        left = len(script.block_hashes) // HASH_BYTES - progress.num_hashes_told
        next_block = prompt // size + progress.num_hashes_told
        self._fills_at[slot] = (next_block + 1) * size if prompt and left else _NEVER

    def _sample(self, slot: int, end: int) -> bool:
        """A token is sampled with `end` tokens known. Returns whether it is the script's last."""
        progress = self._progress[int(self._serial[slot])]
        if not progress.num_prompt_tokens:
            progress.num_prompt_tokens = end
            self._load(progress)
        return end >= int(self._ends_at[slot])

    def _fill(self, slot: int, end: int) -> bytes:
        """Hashes of the generated blocks, not told so far, that are full with `end` tokens."""
        progress = self._progress[int(self._serial[slot])]
        told, size = progress.num_hashes_told, self._block_size
        full = end // size - progress.num_prompt_tokens // size
        packed = progress.script.block_hashes[told * HASH_BYTES : full * HASH_BYTES]
        progress.num_hashes_told += len(packed) // HASH_BYTES
        self._load(progress)
        return packed


class ScriptedDevice(Scripts):
    """Answers `Forward` items from scripts, when somebody else says that they are done.

    The driver of ranks in lock-step owns the barrier: each rank launches on a device of this kind, the driver prices
    the step of the whole group and calls `finish_at`. On its own a rank has a `PricedDevice`.

    Args:
        block_size: tokens of a KV block, the scheduler's.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._launched: tuple[Batch, StepResult] | None = None
        self._num_moved = 0

    # --- Device -----------------------------------------------------------------------------------------------------

    def launch(self, item: Forward, now_ns: int) -> None:
        """Take `item`; `batch` says what it costs, and `finish_at` is still to be called."""
        if self._launched is not None:
            raise InvariantError("launched twice without finish_at: nobody priced the first item")
        units = item.units
        self._launched = (Batch(units.start, units.num_tokens), self.answer(units))

    @property
    def batch(self) -> Batch | None:
        """What was launched and has no end yet; None: nothing."""
        return None if self._launched is None else self._launched[0]

    def finish_at(self, ready_ns: int) -> None:
        """Say when the launched item is done."""
        if self._launched is None:
            raise InvariantError("finish_at without a launched item")
        self._pending.append((ready_ns, self._launched[1]))
        self._launched = None

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """See `Device.move_blocks`: counts what is copied; whoever prices the next item takes that with it."""
        self._num_moved += moves.num_blocks * self._block_size

    def take_num_moved(self) -> int:
        """Tokens whose KV was copied since the last call; whole blocks."""
        num_moved, self._num_moved = self._num_moved, 0
        return num_moved

    def poll(self, now_ns: int) -> list[StepResult]:
        """See `Device.poll`."""
        ready = []
        while self._pending and self._pending[0][0] <= now_ns:
            ready.append(self._pending.popleft()[1])
        return ready

    def ready_at_ns(self) -> int | None:
        """See `Device.ready_at_ns`; None also while a launched item has no end yet."""
        return self._pending[0][0] if self._pending else None

    # --- many steps at once -----------------------------------------------------------------------------------------

    def steps_until_finish(self, slots: Slots, num_computed: Int32s) -> int:
        """Coming decode steps, up to the first that ends a script and with it; 0: nobody knows before the next.

        Args:
            slots: int64[n], the scheduler's running sequences, nothing in flight.
            num_computed: int32[n], their tokens with KV.
        """
        if len(slots) == 0:
            return 0
        try:
            ends_at = self._ends_at.take(slots)
        except IndexError:
            return 0  # a slot in which nothing was ever launched
        return max(int((ends_at - num_computed).min()), 0)

    def complete_steps(self, slots: Slots, num_computed: Int32s, num_steps: int) -> tuple[dict[int, bytes], list[int]]:
        """The effect of launching `num_steps` decode steps, at most `steps_until_finish`.

        Returns:
            The arguments of `DecodeJumps.advance`: packed hashes of the generated blocks that they fill, by slot; and
            the slots whose scripts end in the last of them.
        """
        end = num_computed + num_steps
        told = {}
        for row in true_rows(end >= self._fills_at.take(slots)):
            packed = self._fill(int(slots[row]), int(end[row]))
            if packed:
                told[int(slots[row])] = packed
        finished: list[int] = slots.take(true_rows(end >= self._ends_at.take(slots))).tolist()
        for slot in finished:
            self.forget(int(self._serial[slot]))
        return told, finished


class PricedDevice(ScriptedDevice):
    """A `core.work.Device` on virtual time: each item takes what the cost model says, one after the other.

    Args:
        cost: prices the items.
        block_size: tokens of a KV block, the scheduler's.
    """

    def __init__(self, cost: CostModel, block_size: int) -> None:
        super().__init__(block_size)
        self.cost = cost
        self._free_at_ns = 0

    def launch(self, item: Forward, now_ns: int) -> None:
        """See `Device.launch`."""
        super().launch(item, now_ns)
        assert self.batch is not None, "launch leaves a batch"
        price_ns = self.cost.step_ns(self.batch) + self.cost.move_ns(self.take_num_moved())
        self._free_at_ns = max(now_ns, self._free_at_ns) + price_ns
        self.finish_at(self._free_at_ns)

    def decode_steps_ns(self, num_computed: Ints, num_steps: int) -> Int64s:
        """int64[num_steps], what each of the coming decode steps takes; see `CostModel.decode_steps_ns`."""
        return self.cost.decode_steps_ns(num_computed, num_steps)
