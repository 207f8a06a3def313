"""Columns of a plan, gathered from the table of running sequences."""

from __future__ import annotations

import numpy as np

from moestro.core.work import LOGITS_NONE, LOGITS_PROMPT, Int32s, Slots, Units
from moestro.engine.sequences import SequenceTable

_BYTES = np.dtype(np.uint8)  # a view as a type object takes three times as long
_NO_TABLES = np.empty((1 << 20, 0), np.int32)  # takes no memory


def make_units(table: SequenceTable, slots: Slots, num_tokens: Int32s) -> Units:
    """Make the units of a plan, and mark their tokens as in flight, behind units that are in flight already."""
    start, known = table.progress(slots)
    # LOGITS_LAST is 1, so the comparison itself is the column.
    logits = (start + num_tokens == known).view(_BYTES)
    if table.num_scoring:
        logits[table.last_num_tokens[slots] == table.num_prompt[slots]] = LOGITS_NONE
    following = None
    if table.num_wanting_prompt_logprobs:
        asks = table.wants_prompt_logprobs[slots] & (start < table.num_tokens[slots])  # not behind the first token
        logits[asks] |= LOGITS_PROMPT
        if not table.num_hashed:
            following = _token_ids(table, slots[asks], start[asks] + 1, num_tokens[asks])
    edits = table.logit_edits(slots, logits, known) if table.num_editing else None
    table.begin_units(slots, num_tokens)
    fixed, is_hashed = table.fixed_columns(slots), table.num_hashed > 0
    return Units(
        slot=slots,
        serial=fixed.serial,
        service_class=fixed.service_class,
        start=start,
        num_tokens=num_tokens,
        write_start=start if is_hashed else np.maximum(start, fixed.write_start),
        logits=logits,
        block_tables=_NO_TABLES[: len(slots)] if is_hashed else _block_tables(table, slots),
        sampling=fixed.sampling,
        token_ids=None if is_hashed else _token_ids(table, slots, start, num_tokens),
        next_token_ids=following,
        edits=edits,
    )


def _block_tables(table: SequenceTable, slots: Slots) -> Int32s:
    """The units' blocks, and whatever follows them in the rows of the table."""
    width = max(table.capacity[slots].tolist()) // table.block_size
    return table.block_table[slots, :width]  # `take` would copy the whole table first


def _token_ids(table: SequenceTable, slots: Slots, start: Int32s, num_tokens: Int32s) -> Int32s:
    """The units' tokens end to end, where no hashed trace is replayed."""
    if not np.count_nonzero(num_tokens > 1):
        return table.token_ids[slots, start]
    total = int(num_tokens.sum())
    row = np.repeat(slots, num_tokens)
    first = np.repeat(start - (np.cumsum(num_tokens) - num_tokens), num_tokens)
    return table.token_ids[row, first + np.arange(total, dtype=np.int32)]
