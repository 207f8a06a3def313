"""A step on the device: its units as tensors that all layers share, and its result from the logits.

Units lie end to end in one row of tokens. The slots that each token's K and V go to, and the slots that each query
reads, depend only on the block tables. NumPy computes them once a step (once per window, where layers differ), without
a Python object per token.

The result has two halves. The device's computation never waits for an accelerator; the host reads it once the step's
event has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.core.request import TokenLogprobs
from moestro.core.work import FROM_STEP_BEFORE, LOGITS_LAST, LOGITS_PROMPT, StepResult, StepVisits, Units, range_ends
from moestro.model.pools import KVPools
from moestro.model.sampler import LogprobTensors, edit_logits, find_peaks, measure_logprobs, sample, unmasked_units
from moestro.model.tensors import upload, upload_all

Int64s = NDArray[np.int64]
_T = TypeVar("_T", bound=np.generic)

# A long chunk is attended in pieces of at most so many queries and query-key pairs: masks stay small, and keys behind a
# whole piece are not touched.
_MAX_PIECE_QUERIES, _MIN_PIECE_QUERIES, _MAX_PIECE_PAIRS = 512, 16, 1 << 20
# One-token units are attended in groups whose K and V are copied out of the pools, padded to the longest. This bounds a
# group's copies (8 KV heads of 128 in bfloat16: 256 MiB); a unit that reads more is a separate group. A CPU is up to
# four times faster on copies of a few MiB than on large ones; on an accelerator many small calls cost launches.
_MAX_GROUP_SLOTS, _MAX_GROUP_SLOTS_ON_CPU = 1 << 16, 1 << 12


@dataclass(frozen=True, slots=True)
class Reach:
    """Keys that a layer's queries attend to besides their own.

    Attributes:
        window: tokens, the query's own included; None means everything before it.
        has_sink: whether one extra key, of zeros, follows the others.
    """

    window: int | None
    has_sink: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecodeView:
    """Reads of a group of one-token units, padded to the longest.

    Attributes:
        rows: int64[units], their rows in the step, or None where the group is the whole step.
        slots: int64[units, width]; padding repeats a slot of the same sequence; a sink has the last column.
        allowed: bool[units, 1, 1, width], keys that the query may attend to.
    """

    rows: Tensor | None
    slots: Tensor
    allowed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PieceView:
    """Reads of consecutive queries of one longer unit.

    Attributes:
        first_row, end_row: range of their rows in the step.
        slots: int64[width]; a sink has the last one.
        allowed: bool[1, 1, queries, width].
    """

    first_row: int
    end_row: int
    slots: Tensor
    allowed: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepView:
    """All reads of a step under one reach."""

    decode: tuple[DecodeView, ...]
    pieces: tuple[PieceView, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """Tokens of a launched step, on its device.

    Attributes:
        slots: int64[n], slots of the units that sampled them.
        tokens: int64[n], negative where there is none.
    """

    slots: Int64s
    tokens: Tensor

    def of(self, slots: Int64s, device: torch.device) -> Tensor:
        """Return the tokens of `slots`, int64[m], without waiting on the host. Where there is none, any token id."""
        if not np.array_equal(slots, self.slots):  # else these are all in order, as in most steps
            in_order = self.slots.argsort()
            rows = in_order[self.slots.searchsorted(slots, sorter=in_order)]
            return self.tokens[upload(rows, device)].clamp_(min=0)
        return self.tokens.clamp(min=0)


class StepLayout:
    """A step's units as kernels read them. All arrays are contiguous.

    Attributes:
        tables: int32[units, blocks], block tables.
        rows: int64[units + 1], first row of each unit, and the number of rows.
        lengths: int64[units], tokens of each unit's sequence, those of the step included.
        addresses: addresses of the three.
    """

    def __init__(self, units: Units, end_row_of: Int64s, length_of: Int64s) -> None:
        self.tables = np.ascontiguousarray(units.block_tables, np.int32)
        self.rows = np.concatenate([np.zeros(1, np.int64), end_row_of])
        self.lengths = length_of.astype(np.int64)
        self.addresses = (self.tables.ctypes.data, self.rows.ctypes.data, self.lengths.ctypes.data)


class PagedStep:
    """One step over some units.

    Args:
        units: units with token ids; `block_tables` must cover every position that they read or write.
        pools: their KV cache.
        device: device of the tensors.

    Attributes:
        positions: int64[tokens], as `position_ids`, on the host.
        token_ids: int32[tokens], as `input_ids`, on the host.
        kernel_units: what a kernel keeps of the step while layers share it.
    """

    def __init__(self, units: Units, pools: KVPools, device: torch.device) -> None:
        assert units.token_ids is not None, "a network cannot run a trace that carries no token ids"
        self.units = units
        self.pools = pools
        self._device = device
        self.num_tokens_of = units.num_tokens.astype(np.int64)
        self.length_of = units.start + self.num_tokens_of
        self.token_ids = units.token_ids
        self._is_decode = len(self.token_ids) == len(units)  # one token of each unit, as in most steps
        if self._is_decode:
            row_ends = np.arange(len(units) + 1)
            self.first_row_of, self.end_row_of = row_ends[:-1], row_ends[1:]
            self.positions = units.start.astype(np.int64)
        else:
            self.end_row_of = self.num_tokens_of.cumsum()
            self.first_row_of = self.end_row_of - self.num_tokens_of
            first_positions = np.repeat(units.start - self.first_row_of, self.num_tokens_of)
            self.positions = np.arange(self.end_row_of[-1]) + first_positions
        self.kernel_units: Any = None
        self._uploaded: list[Tensor] | None = None
        self._from_before: tuple[Int64s, Int64s, Tensor] | None = None  # rows, their units, and the tokens
        self._views: dict[Reach, StepView] = {}

    def fill_tokens(self, before: SampledTokens) -> None:
        """Take FROM_STEP_BEFORE among the token ids from the step launched before, without waiting on the host."""
        rows = np.flatnonzero(self.token_ids == FROM_STEP_BEFORE)
        if not len(rows):
            return
        unit = rows if self._is_decode else np.searchsorted(self.end_row_of, rows, side="right")
        self._from_before = rows, unit, before.of(self.units.slot[unit], self._device)

    def write_tokens(self, ids: Tensor) -> None:
        """Write the tokens of `fill_tokens` to their places in `ids`, int64[tokens or more]."""
        if self._from_before is None:
            return
        rows, _, tokens = self._from_before
        if len(rows) == len(self.token_ids):
            ids[: len(rows)].copy_(tokens)
        else:
            ids.index_copy_(0, self.upload(rows), tokens)

    def tokens_before(self, units: Int64s) -> Tensor | None:
        """The token that each of `units` has from the step before; None where no unit of the step has one.

        Args:
            units: int64[n], ascending, all units whose logits are wanted.

        Returns:
            int64[n], -1 for a unit whose tokens the host had.
        """
        if self._from_before is None:
            return None
        _, own, tokens = self._from_before
        if len(own) == len(units):
            return tokens
        found = torch.full((len(units),), -1, dtype=torch.int64, device=self._device)
        return found.index_copy_(0, self.upload(np.searchsorted(units, own)), tokens)

    # Cached properties: the front part alone reads the ids, and the sampler's stage needs no slots.
    @cached_property
    def input_ids(self) -> Tensor:
        """int64[1, tokens]."""
        ids = self._find(0, lambda: self.token_ids.astype(np.int64))
        self.write_tokens(ids)
        return ids[None]

    @cached_property
    def position_ids(self) -> Tensor:
        """int64[1, tokens]."""
        return self._find(1, lambda: self.positions)[None]

    @cached_property
    def write_slots(self) -> Tensor:
        """int64[tokens], destination of each token's K and V."""
        return self._find(2, self._slots_to_write)

    @cached_property
    def logit_row_ids(self) -> Tensor:
        """int64[rows], `logit_rows` on the device."""
        return self._find(3, lambda: self.logit_rows)

    def place(self, columns: list[Tensor], kernel_units: Any) -> None:
        """Let `row_columns` and what the kernels keep of the step be in memory that is already on the device."""
        self._uploaded, self.kernel_units = columns, kernel_units

    def row_columns(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """Token ids, positions, slots to write and rows with requested logits, on the host."""
        return self.token_ids.astype(np.int64), self.positions, self._slots_to_write(), self.logit_rows

    def _find(self, place: int, make: Callable[[], Int64s]) -> Tensor:
        """Upload one of `row_columns`: on a CPU by itself, to an accelerator with all others in one copy."""
        if self._uploaded is None:
            if self._device.type == "cpu":
                return self.upload(make())
            self._uploaded = upload_all(self.row_columns(), self._device)
        return self._uploaded[place]

    @cached_property
    def layout(self) -> StepLayout:
        """Units on the host, for kernels."""
        return StepLayout(self.units, self.end_row_of, self.length_of)

    @cached_property
    def logit_rows(self) -> Int64s:
        """Rows with requested logits, ascending."""
        if self._is_decode:
            return np.flatnonzero(self.units.logits)
        wanted = np.repeat(self.units.logits & LOGITS_PROMPT != 0, self.num_tokens_of)
        wanted[self.end_row_of[self.units.logits & LOGITS_LAST != 0] - 1] = True
        return np.flatnonzero(wanted)

    @property
    def windows(self) -> set[int | None]:
        """Windows that some layer has requested."""
        return {reach.window for reach in self._views}

    def view(self, reach: Reach) -> StepView:
        """Reads of each query under `reach`."""
        if reach not in self._views:
            self._views[reach] = StepView(tuple(self._decode_views(reach)), tuple(self._piece_views(reach)))
        return self._views[reach]

    def upload(self, array: NDArray[np.generic]) -> Tensor:
        """Copy `array` to the step's device, without waiting on the host."""
        return upload(array, self._device)

    def _slots_to_write(self) -> Int64s:
        unit = self.first_row_of if self._is_decode else np.repeat(np.arange(len(self.units)), self.num_tokens_of)
        block, offset = np.divmod(self.positions, self.pools.block_size)
        slots: Int64s = self.units.block_tables[unit, block].astype(np.int64) * self.pools.block_size + offset
        slots[self.positions < self.units.write_start[unit]] = self.pools.scratch_slot
        return slots

    def _decode_views(self, reach: Reach) -> Iterator[DecodeView]:
        units, size = np.flatnonzero(self.num_tokens_of == 1), self.pools.block_size
        end = self.length_of[units]
        begin = np.maximum(end - (reach.window or end), 0)
        most = _MAX_GROUP_SLOTS_ON_CPU if self._device.type == "cpu" else _MAX_GROUP_SLOTS
        for group in _group(-(-end // size) - begin // size, most // size):
            yield self._decode_view(reach, units[group], begin[group], end[group])

    def _decode_view(self, reach: Reach, units: Int64s, begin: Int64s, end: Int64s) -> DecodeView:
        positions, slots = self._slots_to_read(units, begin, end)
        allowed = (positions >= begin[:, None]) & (positions < end[:, None])
        # Padding reads the unit's own newest slot, so that another sequence's leftovers (such as a NaN) cannot enter.
        newest = slots[np.arange(len(units)), end - 1 - positions[:, 0]]
        slots = np.where(allowed, slots, newest[:, None])
        rows = None if len(units) == len(self.units) else self.upload(self.first_row_of[units])
        slots, allowed = self._add_sink(reach, slots, allowed)
        return DecodeView(rows, self.upload(slots), self.upload(allowed)[:, None, None])

    def _piece_views(self, reach: Reach) -> Iterator[PieceView]:
        for unit in np.flatnonzero(self.num_tokens_of > 1).tolist():
            end = int(self.length_of[unit])
            num_queries = min(max(_MAX_PIECE_PAIRS // end, _MIN_PIECE_QUERIES), _MAX_PIECE_QUERIES)
            for begin in range(int(self.units.start[unit]), end, num_queries):
                yield self._piece_view(reach, unit, np.arange(begin, min(begin + num_queries, end)))

    def _piece_view(self, reach: Reach, unit: int, queries: Int64s) -> PieceView:
        end = int(queries[-1]) + 1
        begin = max(int(queries[0]) + 1 - (reach.window or end), 0)
        positions, slots = self._slots_to_read(np.array([unit]), np.array([begin]), np.array([end]))
        inside = (positions[0] >= begin) & (positions[0] < end)
        keys, slots = positions[0, inside], slots[0, inside]
        allowed = (keys <= queries[:, None]) & (keys > queries[:, None] - (reach.window or end))
        slots, allowed = self._add_sink(reach, slots, allowed)
        first_row = int(self.first_row_of[unit] + queries[0] - self.units.start[unit])
        return PieceView(first_row, first_row + len(queries), self.upload(slots), self.upload(allowed)[None, None])

    def _add_sink(self, reach: Reach, slots: Int64s, allowed: NDArray[np.bool_]) -> tuple[Int64s, NDArray[np.bool_]]:
        if not reach.has_sink:
            return slots, allowed
        return _append(slots, self.pools.zero_slot), _append(allowed, fill=True)

    def _slots_to_read(self, units: Int64s, begin: Int64s, end: Int64s) -> tuple[Int64s, Int64s]:
        """Positions and slots, int64[units, width], of the whole blocks that cover begin .. end - 1 of each unit."""
        size = self.pools.block_size
        first_block = begin // size
        blocks = first_block[:, None] + np.arange((-(-end // size) - first_block).max())
        # Columns past a shorter unit's last block are ignored, but must exist.
        known = self.units.block_tables
        tables = known[units[:, None], np.minimum(blocks, known.shape[1] - 1)].astype(np.int64)
        within = np.arange(size)
        positions = (blocks[:, :, None] * size + within).reshape(len(units), -1)
        return positions, (tables[:, :, None] * size + within).reshape(len(units), -1)


def _group(num_blocks: Int64s, most: int) -> Iterator[Int64s]:
    """Group indices of `num_blocks` by similar size, so that one long unit does not make all others as expensive.

    A group, padded to its longest, at most doubles in size and holds at most `most` blocks or one unit.
    """
    power = np.ceil(np.log2(num_blocks))
    for each in np.unique(power):
        alike = np.flatnonzero(power == each)
        count = max(most // int(num_blocks[alike].max()), 1)
        yield from (alike[first : first + count] for first in range(0, len(alike), count))


def _append(array: NDArray[_T], fill: int) -> NDArray[_T]:
    """Append one column to `array`."""
    return np.concatenate([array, np.full((*array.shape[:-1], 1), fill, array.dtype)], axis=-1)


class VisitTensor(NamedTuple):
    """`core.work.StepVisits`, on the device. `num_pairs`: int64[units, ranges, workers]."""

    version: int
    ends: tuple[int, ...]
    num_pairs: Tensor


class ExpertVisitCounter:
    """(Token, expert) pairs of each unit by range of layers and worker.

    Args:
        num_layers: layers of the network.
        num_workers: workers of the group.
    """

    def __init__(self, num_layers: int, num_workers: int) -> None:
        self._ends = range_ends(num_layers)
        self._range_of = np.searchsorted(np.array(self._ends), np.arange(num_layers), side="right").tolist()
        self._num_workers, self._version = num_workers, 0
        self._first_column = self._num_pairs = torch.empty(0, dtype=torch.int64)

    def begin(self, step: PagedStep) -> None:
        """Begin to count a step."""
        num_columns = len(self._ends) * self._num_workers
        unit_of_token = np.repeat(np.arange(len(step.units)), step.num_tokens_of)
        self._first_column = step.upload(unit_of_token * num_columns)
        self._num_pairs = torch.zeros(
            len(step.units) * num_columns, dtype=torch.int64, device=self._first_column.device
        )

    def add(self, layer: int, workers: Tensor, version: int) -> None:
        """Count a layer.

        Args:
            workers: int64[tokens * k], worker of each (token, expert) pair, by token.
            version: version of the expert table that is in use.
        """
        self._version = version
        columns = workers.view(len(self._first_column), -1) + self._first_column[:, None]
        columns += self._range_of[layer] * self._num_workers
        self._num_pairs.scatter_add_(0, columns.view(-1), torch.ones_like(workers))

    def read(self) -> VisitTensor:
        """Return the counts of the step."""
        shape = (-1, len(self._ends), self._num_workers)
        return VisitTensor(self._version, self._ends, self._num_pairs.view(shape))


_NO_TOKEN = -1  # placeholder token of a row with non-finite logits
_EXCLUDED = -2  # placeholder token of a row whose edits exclude all tokens
_MAX_MEASURED_ROWS = 256  # log probabilities of a long prompt come in pieces, because each copies its logits


@dataclass(frozen=True, slots=True, eq=False)
class LogprobRows:
    """Log probabilities of some rows.

    Attributes:
        units: int64[n], unit of the step to which each row belongs.
        num_top: int32[n], alternatives that it reports.
        tensors: the rows.
    """

    units: Int64s
    num_top: NDArray[np.int32]
    tensors: LogprobTensors

    def non_finite_units(self) -> Int64s:
        """Units, possibly repeated, of rows with non-finite logits, whose log probability is NaN."""
        units: Int64s = self.units[self.tensors.logprobs.isnan().numpy()]
        return units

    def entries(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Rows of each unit, in order."""
        found: dict[int, list[TokenLogprobs]] = {}
        for unit, entry in zip(self.units.tolist(), self.tensors.rows(self.num_top), strict=True):
            found.setdefault(unit, []).append(entry)
        return {unit: tuple(entries) for unit, entries in found.items()}


@dataclass(frozen=True, slots=True, eq=False)
class PendingResult:
    """Results of a launched step, on their way to the host.

    Attributes:
        units: units of the step.
        sampled_units: int64[n], units that request a token.
        tokens: int64[n], their tokens; `_NO_TOKEN` or `_EXCLUDED` where there is none.
        on_device: the same, for the step after.
        sampled, prompt: log probabilities of sampled and of prompt tokens, where some unit requests them.
        expert_counts: int64[layers, experts]; None for a dense model.
        expert_choices, visits, unmasked: as in `StepResult`.
        done: event that passes when everything is on the host; None means that it is.
    """

    units: Units
    sampled_units: Int64s
    tokens: Tensor
    on_device: SampledTokens
    sampled: LogprobRows | None
    prompt: LogprobRows | None
    expert_counts: Tensor | None
    expert_choices: Tensor | None = None
    visits: VisitTensor | None = None
    unmasked: Int64s | None = None
    done: Any = None  # torch.cuda.Event, whose methods torch leaves untyped

    @property
    def ready(self) -> bool:
        """Whether `read` may be called."""
        return self.done is None or bool(self.done.query())

    def read(self) -> StepResult:
        """Return the result in host types."""
        token_ids = np.full(len(self.units), -1, np.int32)
        tokens = self.tokens.numpy()
        token_ids[self.sampled_units] = np.maximum(tokens, -1)
        sampled = {} if self.sampled is None else self.sampled.entries()
        return StepResult(
            slot=self.units.slot,
            token_ids=token_ids,
            non_finite=self._non_finite(tokens),
            excluded=self._excluded(tokens),
            unmasked=self.unmasked,
            logprobs={unit: entries[0] for unit, entries in sampled.items()},
            prompt_logprobs={} if self.prompt is None else self.prompt.entries(),
            expert_counts=None if self.expert_counts is None else self.expert_counts.numpy(),
            expert_choices=None if self.expert_choices is None else self.expert_choices.numpy(),
            visits=None
            if self.visits is None
            else StepVisits(self.visits.version, self.visits.ends, self.visits.num_pairs.numpy()),
        )

    def _non_finite(self, tokens: Int64s) -> Int64s | None:
        """Return `StepResult.non_finite`. `tokens`: on the host."""
        found = self.sampled_units[tokens < 0]
        if self.prompt is not None:
            found = np.union1d(found, self.prompt.non_finite_units())
        return found if len(found) else None

    def _excluded(self, tokens: Int64s) -> Int64s | None:
        """Return `StepResult.excluded`. `tokens`: on the host."""
        if self.units.edits is None:
            return None
        found = self.sampled_units[tokens == _EXCLUDED]
        return found if len(found) else None


def compute_result(
    step: PagedStep,
    logits: Tensor,
    expert_counts: Tensor | None,
    expert_choices: Tensor | None = None,
    visits: VisitTensor | None = None,
) -> PendingResult:
    """Sample, measure log probabilities, and start all copies to the host.

    Args:
        logits: [requested rows, vocabulary], in the order of `step.logit_rows`.
        expert_counts: int64[layers, experts], or None.
        expert_choices, visits: as in `StepResult`.
    """
    units = step.units
    sampled_units = np.flatnonzero(units.logits & LOGITS_LAST)
    last = logits
    if len(sampled_units) < len(logits):
        last = logits[step.upload(np.searchsorted(step.logit_rows, step.end_row_of[sampled_units] - 1))]
    is_every_unit = len(sampled_units) == len(units)  # as in most steps
    sampling = units.sampling if is_every_unit else units.sampling[sampled_units]
    positions = step.length_of if is_every_unit else step.length_of[sampled_units]
    edited = last
    if units.edits is not None:
        edited = edit_logits(last, units.edits, sampled_units, sampling, step.tokens_before(sampled_units))
    tokens, is_finite = find_peaks(edited)
    tokens = sample(edited, sampling, positions, tokens)
    if edited is not last:
        tokens = tokens.where(is_finite, _EXCLUDED)
        is_finite = find_peaks(last).is_finite
    tokens = tokens.where(is_finite, _NO_TOKEN)
    sampled = _measure_sampled(step, sampled_units, last, tokens)
    prompt = _measure_prompts(step, logits)
    unmasked = unmasked_units(units.edits)
    on_device = SampledTokens(units.slot[sampled_units], tokens)
    if logits.device.type == "cpu":
        return PendingResult(
            units, sampled_units, tokens, on_device, sampled, prompt, expert_counts, expert_choices, visits, unmasked
        )
    tokens, sampled, prompt = to_host(tokens), _measured_to_host(sampled), _measured_to_host(prompt)
    expert_counts = None if expert_counts is None else to_host(expert_counts)
    expert_choices = None if expert_choices is None else to_host(expert_choices)
    visits = None if visits is None else visits._replace(num_pairs=to_host(visits.num_pairs))
    done = cast(Any, torch.cuda.Event)()
    done.record(torch.cuda.current_stream(logits.device))  # the process's current device may differ
    return PendingResult(
        units, sampled_units, tokens, on_device, sampled, prompt, expert_counts, expert_choices, visits, unmasked, done
    )


def _measure_sampled(step: PagedStep, sampled_units: Int64s, last: Tensor, tokens: Tensor) -> LogprobRows | None:
    """Measure the log probabilities of sampled tokens; a row without a token gets those of any."""
    sampling = step.units.sampling
    rows = np.flatnonzero(sampling["num_logprobs"][sampled_units] >= 0)
    if not len(rows):
        return None
    units = sampled_units[rows]
    num_top: NDArray[np.int32] = sampling["num_logprobs"][units]
    lists: NDArray[np.bool_] = sampling["num_listed"][units] > 0
    listed = _listed(sampling, units, lists)
    at = step.upload(rows)
    tensors = measure_logprobs(
        last[at],
        tokens[at].clamp(min=0),
        int(num_top[~lists].max(initial=0)),
        None if listed is None else step.upload(listed),
    )
    return LogprobRows(units, num_top, tensors)


def _listed(sampling: NDArray[np.void], units: Int64s, lists: NDArray[np.bool_]) -> Int64s | None:
    """Return the tokens that some rows list, as `measure_logprobs` takes them. None means that no row lists any.

    Args:
        sampling: SAMPLING_ROW of all units.
        units: int64[n], unit of each row.
        lists: bool[n], rows that list tokens.
    """
    if not lists.any():
        return None
    width = int(sampling["num_listed"][units[lists]].max())
    listed: Int64s = sampling["listed"][units, :width].astype(np.int64)
    listed[~lists] = -1
    return listed


def _measure_prompts(step: PagedStep, logits: Tensor) -> LogprobRows | None:
    units = step.units
    asks = units.logits & LOGITS_PROMPT != 0
    if not asks.any():
        return None
    assert units.next_token_ids is not None, "a unit asks for prompt logprobs without the tokens that follow"
    unit_of_row = np.repeat(np.arange(len(units)), step.num_tokens_of)
    token_rows = np.flatnonzero(asks[unit_of_row])
    of_unit = unit_of_row[token_rows]
    num_top: NDArray[np.int32] = units.sampling["num_prompt_logprobs"][of_unit].clip(0)
    lists: NDArray[np.bool_] = units.sampling["lists_prompt"][of_unit] > 0
    listed = _listed(units.sampling, of_unit, lists)
    rows = np.searchsorted(step.logit_rows, token_rows)
    next_ids, most = units.next_token_ids.astype(np.int64), int(num_top[~lists].max(initial=0))
    parts = [
        measure_logprobs(
            logits[step.upload(rows[piece])],
            step.upload(next_ids[piece]),
            most,
            None if listed is None else step.upload(listed[piece]),
        )
        for piece in (slice(i, i + _MAX_MEASURED_ROWS) for i in range(0, len(rows), _MAX_MEASURED_ROWS))
    ]
    return LogprobRows(of_unit, num_top, LogprobTensors.join(parts))


def _measured_to_host(measured: LogprobRows | None) -> LogprobRows | None:
    return measured and LogprobRows(measured.units, measured.num_top, measured.tensors.map(to_host))


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy that the host may read once the step's event has passed; on a CPU, the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    # Contiguous whatever `tensor` is: to memory with gaps or with its dimensions in another order, torch copies by way
    # of a second host tensor, which it reads before the data have arrived.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
