"""Random units with all that a unit may have, and a description of each by itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from parity.drive import greedy

from moestro.core.work import LOGITS_LAST, LOGITS_PROMPT, LogitEdits, Units


def random_units(rng: np.random.Generator, num: int, *, width: int, first_slot: int = 0) -> Units:
    num_tokens = rng.integers(1, 5, num).astype(np.int32)
    logits = rng.choice([0, LOGITS_LAST, LOGITS_PROMPT, LOGITS_LAST | LOGITS_PROMPT], num).astype(np.uint8)
    num_prompt_logits = int(num_tokens[logits & LOGITS_PROMPT != 0].sum())

    def columns(most: int, rows: int = 2) -> np.ndarray:
        unit = np.sort(rng.integers(0, num, rng.integers(0, most)))
        return np.concatenate([unit[None], rng.integers(0, 99, (rows - 1, len(unit)))]).astype(np.int32)

    counted, biased = columns(20), columns(6)
    return Units(
        slot=(first_slot + np.arange(num)).astype(np.int32),
        serial=rng.integers(0, 1000, num),
        service_class=rng.integers(0, 2, num).astype(np.uint8),
        start=rng.integers(0, 50, num).astype(np.int32),
        num_tokens=num_tokens,
        write_start=rng.integers(0, 50, num).astype(np.int32),
        logits=logits,
        block_tables=rng.integers(0, 90, (num, width)).astype(np.int32),
        sampling=greedy(num, seed=rng.integers(0, 99, num)),
        token_ids=rng.integers(0, 99, int(num_tokens.sum())).astype(np.int32),
        next_token_ids=rng.integers(0, 99, num_prompt_logits).astype(np.int32) if num_prompt_logits else None,
        edits=LogitEdits(
            counted,
            rng.integers(0, 3, counted.shape[1]).astype(np.int32),
            biased,
            rng.random(biased.shape[1]),
            columns(4),
            random_masks(rng, num),
            uncounted=np.flatnonzero(rng.random(num) < 0.3).astype(np.int32),
            banned_after=columns(9, 3),
        ),
    )


def units_of(units: Sequence[tuple[int, int]], first_slot: int = 0) -> Units:
    """Units of (class, tokens), without token ids and edits of logits."""
    made = random_units(np.random.default_rng(0), len(units), width=1, first_slot=first_slot)
    return msgspec.structs.replace(
        made,
        service_class=np.array([each for each, _ in units], np.uint8),
        num_tokens=np.array([num for _, num in units], np.int32),
        edits=None,
        next_token_ids=None,
        token_ids=None,
    )


class NumberedMask:
    """A mask with a number and no content."""

    def __init__(self, number: int) -> None:
        self.number = number

    def words(self) -> np.ndarray:
        return np.array([self.number], np.int32)


def random_masks(rng: np.random.Generator, num: int) -> tuple[tuple[int, NumberedMask], ...]:
    units = np.flatnonzero(rng.random(num) < 0.3).tolist()
    return tuple((unit, NumberedMask(int(rng.integers(1000)))) for unit in units)


def unit_by_unit(units: Units) -> list[dict]:
    """Everything that each unit has, spelt out."""
    first, following, found = 0, 0, []
    for i in range(len(units)):
        count = int(units.num_tokens[i])
        asks = count if units.logits[i] & LOGITS_PROMPT else 0
        edits, own = units.edits, {}
        if edits is not None:
            own = {
                "counted": [
                    (t, int(g))
                    for (u, t), g in zip(edits.counted.T.tolist(), edits.num_generated, strict=True)
                    if u == i
                ],
                "biased": [
                    (t, float(b)) for (u, t), b in zip(edits.biased.T.tolist(), edits.bias, strict=True) if u == i
                ],
                "banned": [t for u, t in edits.banned.T.tolist() if u == i],
                "uncounted": [True for u in edits.uncounted.tolist() if u == i],
                "banned_after": [pair for u, *pair in edits.banned_after.T.tolist() if u == i],
                "masks": [mask.words().tolist() for u, mask in edits.masks if u == i],
            }
        found.append(
            {
                "slot": int(units.slot[i]),
                "columns": [
                    getattr(units, name)[i].item() for name in ("serial", "service_class", "start", "write_start")
                ],
                "logits": int(units.logits[i]),
                "tokens": units.token_ids[first : first + count].tolist(),
                "next": [] if not asks else units.next_token_ids[following : following + asks].tolist(),
                "table": [block for block in units.block_tables[i].tolist() if block],
                "sampling": [np.asarray(value).tolist() for value in units.sampling[i].item()],
                "edits": {name: values for name, values in own.items() if values},
            }
        )
        first, following = first + count, following + asks
    return found
