"""Selecting parts of `Units`, and their changes to logits."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from moestro.core.work import LOGITS_PROMPT, Int32s, LogitEdits, Units

Int64s = NDArray[np.int64]
_COLUMNS = ("slot", "serial", "service_class", "start", "num_tokens", "write_start", "logits", "sampling")


def select_units(units: Units, index: Int64s) -> Units:
    """Select the units at `index`, which are distinct, in that order."""
    spans = _spans(units.num_tokens, index)
    following = units.next_token_ids
    if following is not None:
        asks = units.logits & LOGITS_PROMPT != 0
        following = following[_spans(np.where(asks, units.num_tokens, 0), index)]
        following = following if len(following) else None
    return Units(
        **{name: getattr(units, name)[index] for name in _COLUMNS},
        block_tables=units.block_tables[index],
        token_ids=None if units.token_ids is None else units.token_ids[spans],
        next_token_ids=following,
        edits=None if units.edits is None else select_edits(units.edits, index, len(units)),
    )


def token_spans(first: NDArray[np.integer], num_tokens: NDArray[np.integer]) -> Int64s:
    """int64[sum of num_tokens], for each i the num_tokens[i] integers from first[i] on."""
    ends = num_tokens.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    spans: Int64s = np.arange(total) + np.repeat(first - (ends - num_tokens), num_tokens)
    return spans


def _spans(num_tokens: Int32s, index: Int64s) -> Int64s:
    """Positions of the tokens of the units at `index` among the tokens of all units."""
    return token_spans((num_tokens.cumsum() - num_tokens)[index], num_tokens[index])


def select_edits(edits: LogitEdits, index: Int64s, num_units: int) -> LogitEdits | None:
    """Select the edits of the units at `index` of `num_units` units. None means that they ask for none."""
    new = np.full(num_units, -1, np.int32)
    new[index] = np.arange(len(index))

    def keep(columns: Int32s) -> tuple[Int32s, Int64s]:
        """Keep columns of selected units, with their new index and sorted by unit. Returns also their old positions."""
        kept = np.flatnonzero(new[columns[0]] >= 0)
        kept = kept[np.argsort(new[columns[0, kept]], kind="stable")]
        return np.concatenate([new[columns[:1, kept]], columns[1:, kept]]), kept

    counted, counted_at = keep(edits.counted)
    biased, biased_at = keep(edits.biased)
    (banned, _), (banned_after, _) = keep(edits.banned), keep(edits.banned_after)
    uncounted = keep(edits.uncounted[None])[0][0]
    kept_masks = sorted(((int(new[unit]), mask) for unit, mask in edits.masks if new[unit] >= 0), key=itemgetter(0))
    if not (kept_masks or any(each.size for each in (counted, biased, banned, banned_after, uncounted))):
        return None
    return LogitEdits(
        counted=counted,
        num_generated=edits.num_generated[counted_at],
        biased=biased,
        bias=edits.bias[biased_at],
        banned=banned,
        masks=tuple(kept_masks),
        uncounted=uncounted,
        banned_after=banned_after,
    )


def join_edits(parts: Sequence[tuple[LogitEdits | None, int]]) -> LogitEdits | None:
    """Join the edits of neighbouring sets of units. A part is the set's edits, if any, and its number of units."""
    shifted = []
    offset = 0
    for edits, num_units in parts:
        if edits is not None:
            shifted.append((edits, np.array([[offset], [0], [0]], np.int32)))
        offset += num_units
    if not shifted:
        return None
    return LogitEdits(
        counted=np.concatenate([edits.counted + by[:2] for edits, by in shifted], axis=1),
        num_generated=np.concatenate([edits.num_generated for edits, _ in shifted]),
        biased=np.concatenate([edits.biased + by[:2] for edits, by in shifted], axis=1),
        bias=np.concatenate([edits.bias for edits, _ in shifted]),
        banned=np.concatenate([edits.banned + by[:2] for edits, by in shifted], axis=1),
        masks=tuple((unit + int(by[0, 0]), mask) for edits, by in shifted for unit, mask in edits.masks),
        uncounted=np.concatenate([edits.uncounted + by[0] for edits, by in shifted]),
        banned_after=np.concatenate([edits.banned_after + by for edits, by in shifted], axis=1),
    )
