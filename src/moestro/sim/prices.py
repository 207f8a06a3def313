"""What a step of a group costs, be it one rank on its own or several that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moestro.cost.model import Batch, CostModel, GroupCostModel, Int64s, Ints
from moestro.cost.tables import MeasuredCost


class Prices(Protocol):
    """Prices the steps of `num_ranks` ranks that begin and end together. One batch or start a rank."""

    @property
    def num_ranks(self) -> int:
        """That keep step."""
        ...

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """What a step takes; None: the rank idles in it. At least one does not."""
        ...

    def move_ns(self, num_tokens: int) -> int:
        """See `CostModel.move_ns`."""
        ...

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """int64[num_steps], what each of the coming decode steps takes; an empty start: the rank idles."""
        ...

    def notes(self) -> list[str]:
        """What whoever reads results has to know of the prices that were given so far; nothing, as a rule."""
        ...


class OneRank:
    """A rank on its own."""

    num_ranks = 1

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """See `Prices.step_ns`."""
        (batch,) = batches
        assert batch is not None, "a step of nobody"
        return self._cost.step_ns(batch)

    def move_ns(self, num_tokens: int) -> int:
        """See `Prices.move_ns`."""
        return self._cost.move_ns(num_tokens)

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """See `Prices.decode_steps_ns`."""
        return self._cost.decode_steps_ns(starts[0], num_steps)

    def notes(self) -> list[str]:
        """See `Prices.notes`: that steps were larger than those of a table."""
        warning = self._cost.warning() if isinstance(self._cost, MeasuredCost) else None
        return [] if warning is None else [warning]


class Barrier:
    """An expert-parallel group in lock-step: its busiest rank sets the time."""

    def __init__(self, cost: GroupCostModel) -> None:
        self._cost = cost

    @property
    def num_ranks(self) -> int:
        """Of the group."""
        return self._cost.num_ep_ranks

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """See `Prices.step_ns`."""
        return self._cost.group_step_ns(batches)

    def move_ns(self, num_tokens: int) -> int:
        """See `Prices.move_ns`."""
        return self._cost.move_ns(num_tokens)

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """See `Prices.decode_steps_ns`."""
        return self._cost.group_decode_steps_ns(starts, num_steps)

    def notes(self) -> list[str]:
        """None."""
        return []
