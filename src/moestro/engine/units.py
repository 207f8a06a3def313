"""A plan's columns, gathered from the running sequences'."""

from __future__ import annotations

import numpy as np

from moestro.core.work import LOGITS_NONE, LOGITS_PROMPT, Int32s, Slots, Units
from moestro.engine.sequences import SequenceTable


def make_units(table: SequenceTable, slots: Slots, num_tokens: Int32s) -> Units:
    """The units of a plan, whose tokens are in flight from now on."""
    start = table.num_computed.take(slots)
    # LOGITS_LAST is 1: a comparison is the column.
    logits = (start + num_tokens == table.num_tokens.take(slots)).view(np.uint8)
    if table.num_scoring:
        logits[table.last_num_tokens[slots] == table.num_prompt[slots]] = LOGITS_NONE
    following = None
    if table.num_wanting_prompt_logprobs:
        asks = table.wants_prompt_logprobs[slots]
        logits[asks] |= LOGITS_PROMPT
        following = _token_ids(table, slots[asks], start[asks] + 1, num_tokens[asks])
    edits = table.logit_edits(slots, logits) if table.num_editing else None
    table.num_in_flight[slots] = num_tokens
    table.num_units_in_flight += len(slots)
    width = int(table.capacity.take(slots).max()) // table.block_size
    return Units(
        slot=slots,
        serial=table.serial.take(slots),
        service_class=table.service_class.take(slots),
        start=start,
        num_tokens=num_tokens,
        write_start=np.maximum(start, table.write_start.take(slots)),
        logits=logits,
        block_tables=table.block_table[slots, :width],  # `take` would copy the whole table, its columns being cut
        sampling=table.sampling.take(slots),  # a fifth of what [slots] costs on rows of this kind
        token_ids=_token_ids(table, slots, start, num_tokens),
        next_token_ids=following,
        edits=edits,
    )


def _token_ids(table: SequenceTable, slots: Slots, start: Int32s, num_tokens: Int32s) -> Int32s | None:
    """The units' tokens end to end; None where hashed traces are replayed."""
    if table.num_hashed:
        return None
    total = int(num_tokens.sum())
    if total == len(slots):
        return table.token_ids[slots, start]
    row = np.repeat(slots, num_tokens)
    first = np.repeat(start - (np.cumsum(num_tokens) - num_tokens), num_tokens)
    return table.token_ids[row, first + np.arange(total, dtype=np.int32)]
