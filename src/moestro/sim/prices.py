"""Durations of a group's steps, for a single rank and for ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moestro.cost.model import Batch, CostModel, GroupCostModel, Int64s, Ints
from moestro.cost.tables import MeasuredCost, OtherGpuCost
from moestro.engine.load_prices import LinearPrices


class Prices(Protocol):
    """Prices steps of `num_ranks` ranks that begin and end together. Each argument holds one item for each rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that step together."""
        ...

    @property
    def copies_beside(self) -> bool:
        """Whether copies to and from host memory run beside steps; otherwise a step waits for all of its plan's."""
        ...

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Return the duration of a step, ns. A batch of None is an idle rank; at least one rank has a batch."""
        ...

    def move_ns(self, num_tokens: int) -> int:
        """Return the duration of copying the KV of `num_tokens` tokens between GPU and host, ns."""
        ...

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Return the duration of each coming decode step, ns. An empty start is an idle rank.

        Returns:
            int64[num_steps], a new array that the caller may change.
        """
        ...

    def notes(self) -> list[str]:
        """Return limits of the prices given so far, for readers of the results; usually none."""
        ...


_TRIAL_TOKENS = 1024  # of a prompt, in the step whose price per token counts


def load_prices(prices: Prices, block_size: int) -> LinearPrices:
    """Prices by which a rank that steps alone copies a prefix from host memory or computes it again.

    A token costs what a step of twice as many tokens takes more: a step reads the weights in any case.
    """
    small, large = (_prompt_ns(prices, num_tokens) for num_tokens in (_TRIAL_TOKENS, 2 * _TRIAL_TOKENS))
    return LinearPrices(prices.move_ns(block_size), (large - small) / _TRIAL_TOKENS)


def _prompt_ns(prices: Prices, num_tokens: int) -> int:
    return prices.step_ns([Batch(np.zeros(1, np.int32), np.array([num_tokens], np.int32))])


class OneRank:
    """Prices of a rank that steps alone.

    Args:
        cost: prices of its steps.
        copies_beside: as in `Prices`.
    """

    num_ranks = 1

    def __init__(self, cost: CostModel, *, copies_beside: bool = True) -> None:
        self._cost = cost
        self.copies_beside = copies_beside

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Implement `Prices.step_ns`."""
        (batch,) = batches
        assert batch is not None, "a step without a batch"
        return self._cost.step_ns(batch)

    def move_ns(self, num_tokens: int) -> int:
        """Implement `Prices.move_ns`."""
        return self._cost.move_ns(num_tokens)

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Implement `Prices.decode_steps_ns`."""
        return self._cost.decode_steps_ns(starts[0], num_steps)

    def notes(self) -> list[str]:
        """Note steps that were larger than those of the cost table."""
        warning = self._cost.warning() if isinstance(self._cost, MeasuredCost | OtherGpuCost) else None
        return [] if warning is None else [warning]


class Barrier:
    """Prices of an expert-parallel group in lock-step: the busiest rank sets the duration of a step."""

    copies_beside = True

    def __init__(self, cost: GroupCostModel) -> None:
        self._cost = cost

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return self._cost.num_ep_ranks

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Implement `Prices.step_ns`."""
        return self._cost.group_step_ns(batches)

    def move_ns(self, num_tokens: int) -> int:
        """Implement `Prices.move_ns`."""
        return self._cost.move_ns(num_tokens)

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Implement `Prices.decode_steps_ns`."""
        return self._cost.group_decode_steps_ns(starts, num_steps)

    def notes(self) -> list[str]:
        """Return no notes, because a roofline covers every step."""
        return []
