"""Progress of requests in one rank: an object for each request, and a table row for each running one.

Data of every step lies in the table's columns (struct-of-arrays). Data of rarer events lies in the object: admission,
preemption, a full block. A sequence's tokens are in the table while it runs, and in the object while it waits after a
preemption.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import HASH_BYTES, name_key, split_hashes
from moestro.core.request import (
    MAX_LISTED_TOKENS,
    SAMPLING_RANGES,
    GrammarBackend,
    Request,
    SamplingParams,
    ServiceClass,
    TokenLogprobs,
)
from moestro.core.views import BE, LS, SHORT, ZERO, has_true
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Int32s, LogitEdits, Slots
from moestro.engine.logit_edits import SequenceEdits, join_edits

_BE = ServiceClass.BE  # to find the member of an enumeration costs more than to compare with it
_NOTHING, _NO_SLOTS = np.empty(0, np.int32), np.empty(0, np.int64)
NEVER = np.iinfo(np.int32).max


class BlockContent(NamedTuple):
    """Content of a full block.

    Attributes:
        parent: name of the block before it. None means that the block begins a prompt.
        token_ids: packed int32.
        cache_salt: salt of the name, where the block begins a prompt.
    """

    parent: bytes | None
    token_ids: bytes
    cache_salt: str | None


class Sequence:
    """Progress of one request, across preemptions.

    Attributes:
        request: the client's request.
        serial: order of arrival at this rank, unique.
        slot: row in the table while running, else None.
        blocks: ids of the held blocks, in the order of the tokens.
        host_blocks: blocks of host memory that keep its KV after a preemption, in the order of the tokens.
        num_kept: tokens whose KV is in host memory; 0 while it runs.
        hashes: hashes of its full blocks known so far, by position.
        generated: int32, tokens sampled before its last preemption, or by the engine from which it was resumed. They
            are zeros in a hashed trace.
        edits: changes to its logits. None means no change.
        num_tokens: known tokens while it waits: the prompt and `generated`.
        last_num_tokens: known tokens with which it ends, by max_tokens or because a replayed answer has no more.
        num_cached_tokens: prompt tokens found in the prefix cache, on the device or in host memory, at its first
            admission; None before.
        num_host_tokens: those of them that were copied from host memory.
        admitted_ns: time of its first admission.
        prompt_logprobs: entries collected so far. None means delivered or not wanted.
        num_preemptions: number of its preemptions.
        is_leaving: whether the sequence has ended or was aborted, and is dropped when its unit in flight returns.
        may_cache: whether its blocks may enter the prefix cache.
        is_reported: whether the API server had an output of it, with its cached tokens and its admission.
        service_class: LS or BE, as given by the client.
        user: `name_key` of the user.
        client: number of its client (`ClientShares.join`).
    """

    __slots__ = (
        "admitted_ns", "blocks", "client", "edits", "generated", "hashes", "host_blocks", "is_leaving", "is_reported",
        "last_num_tokens", "may_cache", "num_cached_tokens", "num_host_tokens", "num_kept", "num_preemptions",
        "num_tokens", "prompt_logprobs", "request", "sampling_row", "serial", "service_class", "slot", "stop_token_ids",
        "user",
    )  # fmt: skip

    def __init__(
        self, request: Request, serial: int, matcher: Any = None, num_output_tokens: int | None = None
    ) -> None:
        self.request = request
        self.serial = serial
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.num_kept = 0
        self.hashes = split_hashes(request.block_hashes)
        self.generated = request.resumed_array() if request.resumed_token_ids else _NOTHING
        self.num_tokens = request.num_known_tokens
        num_output = request.sampling.max_tokens
        if num_output_tokens is not None and num_output_tokens < num_output:
            num_output = num_output_tokens
        self.last_num_tokens = request.num_prompt_tokens + num_output
        self.num_cached_tokens: int | None = None
        self.num_host_tokens = 0
        self.admitted_ns = 0
        self.num_preemptions = 0
        self.is_leaving = self.is_reported = False
        self.may_cache = True
        self.service_class = BE if request.service_class is _BE else LS
        self.user = name_key(request.fair_user)
        self.client = 0
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        wanted = request.sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wanted else None
        self.sampling_row = sampling_row(request.sampling)
        edits_logits = request.token_ids is not None and request.sampling.edits_logits  # a hashed trace has no logits
        self.edits = SequenceEdits(request, matcher) if edits_logits else None

    @property
    def is_new(self) -> bool:
        """Whether no engine has computed any of it."""
        return self.num_cached_tokens is None and not self.request.resumed_token_ids

    def readable_hashes(self) -> list[bytes]:
        """Hashes by which cached blocks may be shared; none while prompt logprobs are still to be computed."""
        return [] if self.prompt_logprobs is not None else self.hashes

    def contents(
        self, first: int, end: int, token_row: NDArray[np.int32], block_size: int
    ) -> dict[bytes, BlockContent]:
        """Contents of blocks `first` .. `end` - 1, by name.

        Args:
            token_row: int32, the sequence's tokens by position.
        """
        return {
            self.hashes[at]: BlockContent(
                self.hashes[at - 1] if at else None,
                token_row[at * block_size : (at + 1) * block_size].tobytes(),
                None if at else self.request.cache_salt,
            )
            for at in range(first, end)
        }

    def learn_hashes(self, packed: bytes) -> None:
        """Append hashes that a priced device knows from the sequence's script."""
        if len(packed) % HASH_BYTES:
            raise ValueError(f"packed hashes hold {len(packed)} bytes, not a multiple of {HASH_BYTES}")
        self.hashes.extend(split_hashes(packed))


@lru_cache(maxsize=256)  # requests of a trace are alike, and a row costs as much as the rest of a sequence
def sampling_row(sampling: SamplingParams) -> NDArray[np.void]:
    """SAMPLING_ROW of a request, shape (). Requests with equal parameters share it, so callers must not write to it."""
    counts = (
        -1 if sampling.logprobs is None else sampling.logprobs,
        -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
    )
    num_listed = len(sampling.logprob_token_ids)
    listed = sampling.logprob_token_ids + (0,) * (MAX_LISTED_TOKENS - num_listed)
    return np.array(
        (*_sampled(sampling), *counts, num_listed, listed, sampling.lists_prompt, sampling.seed), SAMPLING_ROW
    )


_sampled = attrgetter(*SAMPLING_RANGES)


class FixedColumns(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Columns of some slots that never change while these slots run; as in `SequenceTable`. Callers must not write."""

    serial: NDArray[np.int64]
    service_class: NDArray[np.uint8]
    write_start: NDArray[np.int32]
    sampling: NDArray[np.void]


TOKENS, COMPUTED, LAST_TOKENS, CAPACITY, FULL_AT = range(5)  # rows of `SequenceTable.growth`
NUM_GROWTH_COLUMNS = 5


class SequenceTable:
    """Columns of the running sequences; a row is a *slot*.

    Attributes:
        running: int64, slots in order of admission.
        growth: int32[NUM_GROWTH_COLUMNS, slots], the columns that TOKENS to FULL_AT number, which are rows of it, so
            that one gather reads all of them.
        serial: int64[slots], `Sequence.serial`.
        num_tokens: int32[slots], tokens known.
        num_computed: int32[slots], tokens whose KV is in the pool.
        num_prompt: int32[slots].
        service_class: uint8[slots], LS or BE, as given by the client.
        arrival_ns: int64[slots].
        client: int64[slots], `Sequence.client`.
        last_num_tokens: int32[slots], `num_tokens` at which the sequence ends, if nothing else ends it before.
        capacity: int32[slots], tokens that fit into the held blocks.
        write_start: int32[slots], positions below it lie in shared blocks and are never written.
        next_full_at: int32[slots], tokens with KV at which the next block is full and enters the prefix cache. NEVER
            where the hash of that block cannot be known.
        num_in_flight: int32[slots], tokens of the unit in flight; 0 means idle. Of two units, those of the first.
        behind, num_behind: int64[n], int32[n], slots with a second unit in flight, behind the first, and its tokens.
        wants_prompt_logprobs, edits_logits, has_grammar: bool[slots].
        block_table: int32[slots, max blocks]. Rows of hashed traces are not written, because no device reads them.
        token_ids: int32[slots, max_model_len].
        sampling: SAMPLING_ROW[slots].
        sits_out: bool[slots], sequences that get no unit before their token mask is ready.
        num_sitting_out: rows that sit out.
        num_units_in_flight: rows with a unit in flight.
        num_hashed: rows of hashed traces, without token ids.
        num_wanting_prompt_logprobs, num_editing: rows that ask for prompt logprobs, or for changes to their logits.
        num_scoring: rows with max_tokens 0.
        num_be: best-effort rows.
        stop_sets: rows with each set of stop tokens but the empty one.
        grammars: computes the masks of sequences with a grammar. None means that there are none.

    The counts spare the usual step a look at columns that are all zero.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        def column(*shape: int) -> NDArray[np.int32]:
            return np.zeros((num_slots, *shape), np.int32)

        self.block_size = block_size
        self.running: Slots = np.empty(0, np.int64)
        self.serial = np.zeros(num_slots, np.int64)
        self.growth = np.zeros((NUM_GROWTH_COLUMNS, num_slots), np.int32)
        self.num_tokens, self.num_computed, self.last_num_tokens, self.capacity, self.next_full_at = self.growth
        self.num_prompt = column()
        self.service_class = np.zeros(num_slots, np.uint8)
        self.arrival_ns = np.zeros(num_slots, np.int64)
        self.client = np.zeros(num_slots, np.int64)
        self.write_start = column()
        self.num_in_flight = column()
        self.behind, self.num_behind = _NO_SLOTS, _NOTHING
        self.wants_prompt_logprobs = np.zeros(num_slots, np.bool_)
        self.edits_logits = np.zeros(num_slots, np.bool_)
        self.has_grammar = np.zeros(num_slots, np.bool_)
        self.block_table = column(-(-max_model_len // block_size))
        self.token_ids = column(max_model_len + 1)  # pages are touched only where tokens are written
        self.sampling = np.zeros(num_slots, SAMPLING_ROW)
        self.sits_out = np.zeros(num_slots, np.bool_)
        self.num_sitting_out = 0
        self.num_units_in_flight = 0
        self.num_hashed = 0
        self.num_wanting_prompt_logprobs = 0
        self.num_editing = 0
        self.num_scoring = 0
        self.num_be = 0
        self.stop_sets = Counter[frozenset[int]]()
        self.grammars: GrammarBackend | None = None
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._fixed: tuple[Slots, FixedColumns] | None = None  # of the slots in `running` when it was made
        self._free = list(range(num_slots - 1, -1, -1))
        self._zeros = np.zeros(max_model_len + 1, np.int32)  # tokens of hashed traces, read-only
        self._zeros.flags.writeable = False

    @property
    def num_free_slots(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    def at(self, slot: int) -> Sequence:
        """The sequence in a slot that is in use."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def at_all(self, slots: Slots) -> list[Sequence]:
        """The sequences in `slots`, which are all in use."""
        return list(map(self.sequences.__getitem__, slots.tolist()))  # type: ignore[arg-type]

    def insert(self, sequence: Sequence, num_computed: int, num_shared: int) -> int:
        """Put `sequence`, whose blocks are set, into a slot at the end of `running`.

        Args:
            num_computed: tokens that have KV already.
            num_shared: number of its first blocks that come from the prefix cache.

        Returns:
            The slot.
        """
        slot = self._free.pop()
        request, num_tokens, num_blocks = sequence.request, sequence.num_tokens, len(sequence.blocks)
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.serial[slot] = sequence.serial
        self.num_tokens[slot] = num_tokens
        self.num_computed[slot] = num_computed
        self.num_prompt[slot] = request.num_prompt_tokens
        self.service_class[slot] = sequence.service_class
        self.arrival_ns[slot] = request.arrival_ns
        self.client[slot] = sequence.client
        self.last_num_tokens[slot] = sequence.last_num_tokens
        self.capacity[slot] = num_blocks * self.block_size
        has_names = sequence.may_cache and (request.token_ids is not None or len(sequence.hashes) > num_shared)
        self.next_full_at[slot] = (num_shared + 1) * self.block_size if has_names else NEVER
        self.write_start[slot] = num_shared * self.block_size
        self.num_in_flight[slot] = 0
        self.wants_prompt_logprobs[slot] = sequence.prompt_logprobs is not None
        self.edits_logits[slot] = sequence.edits is not None
        self.has_grammar[slot] = sequence.edits is not None and sequence.edits.matcher is not None
        self.sampling[slot] = sequence.sampling_row
        self.num_hashed += request.token_ids is None
        self.num_wanting_prompt_logprobs += sequence.prompt_logprobs is not None
        self.num_editing += sequence.edits is not None
        self.num_scoring += request.sampling.max_tokens == 0
        self.num_be += sequence.service_class == BE
        if sequence.stop_token_ids:
            self.stop_sets[sequence.stop_token_ids] += 1
        if request.token_ids is not None:
            self.block_table[slot, :num_blocks] = sequence.blocks
            self.token_ids[slot, : request.num_prompt_tokens] = request.token_array()
            self.token_ids[slot, request.num_prompt_tokens : num_tokens] = sequence.generated
            self.token_ids[slot, num_tokens] = 0  # read as a placeholder, which must not be an earlier sequence's token
        running = np.empty(len(self.running) + 1, np.int64)
        running[:-1] = self.running
        running[-1] = slot
        self.running = running
        return slot

    def remove(self, slot: int) -> Sequence:
        """Take the sequence and its tokens out of its slot. The caller releases its blocks."""
        sequence = self.at(slot)
        start, end = sequence.request.num_prompt_tokens, self.num_tokens.item(slot)
        sequence.num_tokens = end
        is_hashed = sequence.request.token_ids is None
        sequence.generated = self._zeros[: end - start] if is_hashed else self.token_ids[slot, start:end].copy()
        sequence.slot = None
        self.sequences[slot] = None
        if self.num_sitting_out:
            self._go_on(slot)
        self.num_hashed -= is_hashed
        self.num_wanting_prompt_logprobs -= self.wants_prompt_logprobs.item(slot)
        self.num_editing -= sequence.edits is not None
        self.num_scoring -= sequence.request.sampling.max_tokens == 0
        self.num_be -= sequence.service_class == BE
        if sequence.stop_token_ids:
            self._count_out(sequence.stop_token_ids)
        self.running = self._without(slot)
        self._free.append(slot)
        return sequence

    def _count_out(self, stop_token_ids: frozenset[int]) -> None:
        num_left = self.stop_sets[stop_token_ids] - 1
        if num_left:
            self.stop_sets[stop_token_ids] = num_left
        else:
            del self.stop_sets[stop_token_ids]

    def may_stop(self, token_ids: list[int]) -> bool:
        """Whether any of `token_ids` is a stop token of any running sequence."""
        return any(not stop_token_ids.isdisjoint(token_ids) for stop_token_ids in self.stop_sets)  # mostly of one set

    def _without(self, slot: int) -> Slots:
        """The running slots other than `slot`."""
        if len(self.running) > SHORT:
            others: Slots = self.running[self.running != slot]
            return others
        running = self.running.tolist()
        running.remove(slot)
        return np.array(running, np.int64)

    def add_block(self, slot: int, block: int) -> None:
        """Append `block` to the sequence's blocks, in the object and in the row."""
        self.add_blocks([slot], [block])

    def add_blocks(self, slots: list[int], blocks: list[int]) -> None:
        """Append each block to the sequence in its slot; a slot may occur more than once."""
        capacity, block_size = self.capacity, self.block_size
        for at, block in enumerate(blocks):  # they are few: a loop costs less than `np.add.at`
            slot = slots[at]
            sequence = self.sequences[slot]
            assert sequence is not None, f"slot {slot} is empty"  # as `at`, whose call would take as long as the rest
            held = sequence.blocks
            if sequence.request.token_ids is not None:
                self.block_table[slot, len(held)] = block
            held.append(block)
            capacity[slot] = len(held) * block_size

    def learn_hashes(self, slot: int, packed: bytes) -> None:
        """Append hashes, known from its script, of blocks that the sequence completes before they are looked up."""
        sequence = self.at(slot)
        if packed and self.next_full_at[slot] == NEVER:
            self.next_full_at[slot] = (len(sequence.hashes) + 1) * self.block_size
        sequence.learn_hashes(packed)

    def add_prompt_logprobs(self, slot: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """Append entries to the prompt logprobs collected so far."""
        collected = self.at(slot).prompt_logprobs
        assert collected is not None, f"slot {slot} wants no prompt logprobs"
        collected.extend(entries)

    def take_prompt_logprobs(self, slot: int) -> tuple[TokenLogprobs, ...]:
        """Take the prompt logprobs, once.

        The entry after the prompt's last token belongs to the answer and is dropped.
        """
        sequence = self.at(slot)
        assert sequence.prompt_logprobs is not None, f"slot {slot} wants no prompt logprobs"
        entries = tuple(sequence.prompt_logprobs[: sequence.request.num_prompt_tokens - 1])
        sequence.prompt_logprobs = None
        self.wants_prompt_logprobs[slot] = False
        self.num_wanting_prompt_logprobs -= 1
        return entries

    def fixed_columns(self, slots: Slots) -> FixedColumns:
        """Columns of `slots` that do not change while they run; kept from step to step if these are all that run."""
        if self._fixed is not None and self._fixed[0] is slots:
            return self._fixed[1]
        columns = FixedColumns(
            self.serial[slots],
            self.service_class[slots],
            self.write_start[slots],
            # On structured rows `take` costs a fifth of [slots]. No device samples for a hashed trace.
            self.sampling[: len(slots)] if self.num_hashed else self.sampling.take(slots),
        )
        if slots is self.running:  # another array replaces it when a sequence comes or goes
            self._fixed = slots, columns
        return columns

    def logit_edits(self, slots: Slots, logits: NDArray[np.uint8], num_known: Int32s) -> LogitEdits | None:
        """Changes to the wanted `logits` of units at `slots`. None means no change.

        Args:
            num_known: int32[n], tokens of each sequence, with the one that a unit in flight samples.
        """
        rows = np.flatnonzero(self.edits_logits[slots] & (logits & LOGITS_LAST != 0)).tolist()
        sequences, tokens = [], []
        for slot in slots[rows].tolist():
            edits = self.at(slot).edits
            assert edits is not None, f"slot {slot} edits no logits"
            sequences.append(edits)
            tokens.append(self.token_ids[slot, : self.num_tokens[slot]])
        lack_last = (num_known[rows] > self.num_tokens[slots[rows]]).tolist()
        return join_edits(rows, sequences, tokens, lack_last, self.grammars) if rows else None

    def has_failed_grammar(self, sequence: Sequence) -> bool:
        """Whether the grammar of `sequence` allows no token any more."""
        edits = sequence.edits
        if edits is None or edits.matcher is None or self.grammars is None:
            return False
        return self.grammars.failure(edits.matcher) is not None

    def are_leaving(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n], which sequences in `slots` leave when their unit in flight returns."""
        return np.array([self.at(slot).is_leaving for slot in slots.tolist()], np.bool_)

    def idle(self, service_class: int | None = None) -> Slots:
        """Slots without a unit in flight, in order of admission. With `service_class`, only slots of that class."""
        slots = self.running if service_class is None else self._of_class(service_class)
        return slots[self.num_in_flight[slots] == 0] if self.num_units_in_flight else slots

    def schedulable(self, service_class: int | None = None) -> Slots:
        """Those of `idle` that do not sit out."""
        slots = self.idle(service_class)
        return slots[~self.sits_out[slots]] if self.num_sitting_out else slots

    def sit_out(self, slots: Slots) -> None:
        """Give the sequences in `slots` no unit before their masks are ready."""
        self.num_sitting_out += int(np.count_nonzero(~self.sits_out[slots]))
        self.sits_out[slots] = True

    def look_for_masks(self) -> None:
        """Let the sequences go on whose masks have become ready."""
        if not self.num_sitting_out:
            return
        for slot in np.flatnonzero(self.sits_out).tolist():
            edits = self.at(slot).edits
            if edits is None or self.grammars is None or self.grammars.is_ready(edits.matcher):
                self._go_on(slot)

    def _go_on(self, slot: int) -> None:
        self.num_sitting_out -= self.sits_out.item(slot)
        self.sits_out[slot] = False

    def progress(self, slots: Slots) -> tuple[Int32s, Int32s]:
        """Tokens with KV, and known tokens, of `slots` as they will be when their units in flight are done.

        Returns:
            int32[n], int32[n]. The token that a unit in flight samples counts as known.
        """
        computed, known = self.num_computed[slots], self.num_tokens[slots]
        if self.num_units_in_flight:
            computed = computed + self.num_in_flight[slots]
            known = known + (computed == known)
        return computed, known

    def begin_units(self, slots: Slots, num_tokens: Int32s) -> None:
        """Mark units as in flight, behind those that are in flight already."""
        if self.num_units_in_flight and has_true(is_second := self.num_in_flight[slots] > ZERO):
            self.behind, self.num_behind = slots[is_second], num_tokens[is_second]
            slots, num_tokens = slots[~is_second], num_tokens[~is_second]
        self.num_in_flight[slots] = num_tokens
        self.num_units_in_flight += len(slots)

    def end_units(self, slots: Slots) -> Int32s:
        """Mark the units of `slots` as done, so that those behind them are the units in flight.

        Returns:
            int32[n], tokens of the units; 0 where there was none.
        """
        num_done: Int32s = self.num_in_flight[slots]
        self.num_in_flight[slots] = ZERO
        self.num_units_in_flight -= len(slots)
        if len(self.behind):
            self.num_in_flight[self.behind] = self.num_behind
            self.num_units_in_flight += len(self.behind)
            self.behind, self.num_behind = _NO_SLOTS, _NOTHING
        return num_done

    def in_flight(self, service_class: int) -> Slots:
        """Slots of `service_class` with a unit in flight, in order of admission."""
        slots = self._of_class(service_class)
        return slots[self.num_in_flight[slots] > 0]

    def has_no_token(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n], which of `slots` have generated no token."""
        has_none: NDArray[np.bool_] = self.num_tokens[slots] == self.num_prompt[slots]
        return has_none

    def _of_class(self, service_class: int) -> Slots:
        slots: Slots = self.running[self.service_class[self.running] == service_class]
        return slots
