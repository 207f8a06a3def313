"""What a scheduler hands to an executor, an executor to a device, and what comes back: struct-of-arrays, no torch.

A *unit* is the atom of work: consecutive tokens of one sequence in one pass (decode: one token; prefill: a chunk).
A *device* does work; an *executor* decides in which pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import PassCounts
from moestro.core.request import SAMPLING_RANGES, SamplingParams, TokenLogprobs

Int32s = NDArray[np.int32]
Slots = NDArray[np.int64]  # NumPy's own width of an index: a narrower one is converted at every look-up

# Which logits of a unit are wanted, a sum of flags. LAST: those of the last token, to sample the next one.
# PROMPT: those of every token, to report the log probability of the prompt token after it.
LOGITS_NONE, LOGITS_LAST, LOGITS_PROMPT = 0, 1, 2

_DEFAULTS = SamplingParams()
# One sequence's sampling parameters as a row; -1 in a logprobs column means none wanted.
SAMPLING_ROW = np.dtype(
    [
        *((name, np.int32 if type(getattr(_DEFAULTS, name)) is int else np.float32) for name in SAMPLING_RANGES),
        ("num_logprobs", np.int32),
        ("num_prompt_logprobs", np.int32),
        ("seed", np.uint64),
    ]
)


class LogitEdits(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What changes the last logits of some units before a token is chosen. Ragged, so laid end to end as pairs.

    A pair is a column (index into the units, token id); only units with LOGITS_LAST are named. How strong the penalties
    are, their rows of `Units.sampling` say.

    Attributes:
        said: int32[2, n], tokens known so far of the units that have penalties, one pair for each occurrence, by unit:
            those generated, and with a repetition penalty also the prompt's.
        generated: bool[n], which of `said` were generated.
        biased: int32[2, n], each at most once.
        bias: float32[n], what is added to the logits of `biased`.
        banned: int32[2, n], tokens that cannot come yet.
    """

    said: Int32s
    generated: NDArray[np.bool_]
    biased: Int32s
    bias: NDArray[np.float32]
    banned: Int32s


class Units(msgspec.Struct, frozen=True, eq=False, gc=False):
    """n units, in the order in which a device lays them end to end.

    Attributes:
        slot: int64[n], the sequence's row in its scheduler; names the unit until its result is taken.
        serial: int64[n], the sequence's own number, from `Rank.add`; never given twice, where a slot is.
        service_class: uint8[n], LS or BE.
        start: int32[n], position of the first token.
        num_tokens: int32[n], at least 1.
        write_start: int32[n], the first position whose K and V are written. Larger than `start` only where a full
            prefix hit computes its last token again: its block is shared, and a shared block is never written.
        logits: uint8[n], a sum of LOGITS_LAST and LOGITS_PROMPT, or LOGITS_NONE.
        block_tables: int32[n, width], block ids; columns past a sequence's last block are arbitrary valid ids.
        sampling: SAMPLING_ROW[n].
        token_ids: int32[sum of num_tokens], or None when a hashed trace is replayed.
        next_token_ids: int32, the token after each token of the LOGITS_PROMPT units, end to end (0 after the last known
            one, whose entry the scheduler drops); None where no unit asks.
        edits: changes to the logits; None in the usual step, in which no unit asks for any.
    """

    slot: Slots
    serial: NDArray[np.int64]
    service_class: NDArray[np.uint8]
    start: Int32s
    num_tokens: Int32s
    write_start: Int32s
    logits: NDArray[np.uint8]
    block_tables: Int32s
    sampling: NDArray[np.void]
    token_ids: Int32s | None
    next_token_ids: Int32s | None = None
    edits: LogitEdits | None = None

    def __len__(self) -> int:
        return len(self.slot)


class BlockMoves(msgspec.Struct, frozen=True, eq=False, gc=False):
    """KV blocks to be copied between a device and its host's memory: all of `kept`, then all of `restored`.

    Attributes:
        kept: int64[2, n], from the device blocks of the first row to the host blocks of the second.
        restored: int64[2, m], from the host blocks of the first row to the device blocks of the second.
    """

    kept: Slots
    restored: Slots

    @property
    def num_blocks(self) -> int:
        """Copied in all."""
        return len(self.kept[0]) + len(self.restored[0])


class Plan(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one step computes.

    Attributes:
        step: counts the plans of one scheduler.
        units: what is computed.
        moves: what is copied before; None: nothing.
    """

    step: int
    units: Units
    moves: BlockMoves | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in all units."""
        return int(self.units.num_tokens.sum())


class StepResult(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What became of some units (those of one plan, or fewer when others were preempted on the way).

    Attributes:
        slot: int64[n], which units.
        token_ids: int32[n], the sampled token (-1 without LOGITS_LAST), or None from a priced device.
        finished: bool[n], sequences whose script ends here, or None from a device that cannot know.
        non_finite: int64[m], indices into `slot` of units whose wanted logits hold NaN or have no finite maximum: no
            token can be chosen, and their other fields mean nothing. None: there is no such unit.
        logprobs: by index into `slot`, the sampled token's.
        prompt_logprobs: by index into `slot`, one entry per token of a LOGITS_PROMPT unit: that of the token after it.
        block_hashes: by index into `slot`, HASH_BYTES for each block of *generated* tokens completed (hashed traces).
        expert_counts: int64[num_layers, num_experts] tokens each logical expert computed, or None (dense models).
    """

    slot: Slots
    token_ids: Int32s | None = None
    finished: NDArray[np.bool_] | None = None
    non_finite: NDArray[np.int64] | None = None
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    block_hashes: dict[int, bytes] = msgspec.field(default_factory=dict)
    expert_counts: NDArray[np.int64] | None = None

    def select(self, rows: NDArray[np.int64]) -> StepResult:
        """The result of these rows alone; `expert_counts`, which belong to the step, stay whole."""
        row_of = {old: new for new, old in enumerate(rows.tolist())}
        return StepResult(
            slot=self.slot[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            finished=None if self.finished is None else self.finished[rows],
            non_finite=None if self.non_finite is None else np.flatnonzero(np.isin(rows, self.non_finite)),
            logprobs={row_of[i]: v for i, v in self.logprobs.items() if i in row_of},
            prompt_logprobs={row_of[i]: v for i, v in self.prompt_logprobs.items() if i in row_of},
            block_hashes={row_of[i]: v for i, v in self.block_hashes.items() if i in row_of},
            expert_counts=self.expert_counts,
        )


class Forward(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A work item: the whole network over these units, and the sampler."""

    units: Units


class Device(Protocol):
    """Does work items in the order in which they are launched."""

    def launch(self, item: Forward, now_ns: int) -> None:
        """Start `item`; may return before it is done."""
        ...

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Copy KV, after all that was launched before and before all that is launched later. Nothing is answered."""
        ...

    def poll(self, now_ns: int) -> list[StepResult]:
        """Results that are ready, each exactly once, in launch order; never blocks when `ready_at_ns` is known."""
        ...

    def ready_at_ns(self) -> int | None:
        """When the oldest unfinished item will be ready; None: nothing is running, or only the hardware knows."""
        ...


class Executor(Protocol):
    """Turns plans into work items and their results into step results."""

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Start a plan."""
        ...

    def start(self, now_ns: int) -> None:
        """Let the device have what it has room for: called when all that is known now was submitted."""
        ...

    def poll(self, now_ns: int, is_wanted: Callable[[], bool] = ...) -> StepResult | None:
        """Units that are done, or None; every submitted unit that is not recalled comes back exactly once.

        Args:
            is_wanted: asked now and then by an executor that works while it is polled: whether to leave off.
        """
        ...

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Give up units in flight as if they had never been submitted; answers the slots of those that could be."""
        ...

    @property
    def overlaps_plans(self) -> bool:
        """Whether a later plan may pass an earlier one."""
        ...

    @property
    def pass_counts(self) -> PassCounts:
        """Totals; all zero where no plan passes another."""
        ...

    @property
    def num_pieces(self) -> int:
        """Pieces of work begun since the start; stands still when nothing can be computed."""
        ...

    def ready_at_ns(self) -> int | None:
        """As `Device.ready_at_ns`."""
        ...
