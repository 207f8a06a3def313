"""Arithmetic of many decode rounds at once: when blocks are taken and filled while sequences grow by one a round."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moestro.core.work import Int32s

TAKE, FILL = 0, 1  # within a round: schedule takes blocks, then update remembers the full ones


class Horizon(NamedTuple):
    """How far nothing is decided.

    The rounds that may be taken at once are the first `num_rounds` of those that begin before `until_ns`. A round
    begins when it is scheduled, which is when the one before it ends; the first begins now, so it always may.

    Attributes:
        num_rounds: see `Scheduler.horizon`.
        until_ns: when time alone may change the order or the batch; FOREVER_NS: never.
    """

    num_rounds: int
    until_ns: int


def rounds_without_blocks(num_computed: Int32s, capacity: Int32s, block_size: int) -> int:
    """Coming rounds, at least 0, in which no block is taken and none becomes full.

    Args:
        num_computed, capacity: int32[n], n > 0, tokens with KV, and those with blocks, of each sequence.
    """
    until_full = -(num_computed + 1) % block_size
    return int(np.minimum(until_full, capacity - num_computed).min())


def rounds_that_fit(num_computed: Int32s, num_blocks: Int32s, block_size: int, num_free: int, at_most: int) -> int:
    """The most rounds, up to `at_most`, whose new blocks fit into `num_free`.

    Args:
        num_computed, num_blocks: int32[n], tokens with KV and blocks held, of each running sequence.
    """

    def num_needed(rounds: int) -> int:
        return int(np.maximum(-(-(num_computed + rounds) // block_size) - num_blocks, 0).sum())

    if num_needed(at_most) <= num_free:
        return at_most
    low, high = 0, at_most  # `low` rounds fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_needed(middle) <= num_free else (low, middle)
    return low


def blocks_taken(num_computed: list[int], capacity: list[int], block_size: int, num_rounds: int) -> list[int]:
    """The row of each block taken in `num_rounds` rounds, in the order of single rounds.

    Args:
        num_computed, capacity: tokens with KV, and those with blocks, of each sequence. Sequence i computes
            position `num_computed[i] + r` in round r = 0, 1, ...
    """
    taken = [
        (position - computed, row)
        for row, (computed, first) in enumerate(zip(num_computed, capacity, strict=True))
        for position in range(first, computed + num_rounds, block_size)
    ]
    taken.sort()
    return [row for _, row in taken]


def block_events(
    num_computed: Int32s, num_blocks: Int32s, block_size: int, num_rounds: int
) -> list[tuple[int, int, int]]:
    """(round, TAKE or FILL, row) of each block taken or filled in `num_rounds` rounds, in the order of single rounds.

    Sequence i computes position `num_computed[i] + r` in round r = 0, 1, ...
    """
    events = []
    for row, (computed, held) in enumerate(zip(num_computed.tolist(), num_blocks.tolist(), strict=True)):
        end = computed + num_rounds
        events += [(position - computed, TAKE, row) for position in range(held * block_size, end, block_size)]
        first_filled = -(-(computed + 1) // block_size) * block_size
        events += [(border - 1 - computed, FILL, row) for border in range(first_filled, end + 1, block_size)]
    return sorted(events)
