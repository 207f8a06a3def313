"""Experts in the slots of a group's workers, and which of them get tokens. Uses no clock and sends nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY, slots_of_shares
from moestro.core.experts.table_message import ExpertLayers
from moestro.flow.settings import GroupOptions

Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]


class GroupTable:
    """Slots of all places of a group, in the layers that have experts.

    Args:
        options: Workers at the start of the group.
        num_spare: Slots of each worker that are empty at the start.
        experts: Layers of the network that have experts.

    Attributes:
        experts: As given.
        logical_of: int32[places, layers, slots], logical expert in each slot; EMPTY means none. A worker that restarts
            loads these.
        first: First place that can have experts; all later ones can.
    """

    def __init__(self, options: GroupOptions, num_spare: int, experts: ExpertLayers) -> None:
        self.experts = experts
        self._num_shares = options.num_shares
        slots = slots_of_shares(experts.num_experts, options.num_shares, options.first_shares, num_spare)
        self.logical_of: Int32s = np.repeat(slots[:, None], len(experts.layers), axis=1)
        self.first = options.num_homes if options.num_expert_workers else 0

    def held(self) -> Bools:
        """bool[places, layers, experts], which experts each worker holds."""
        return held_by(self.logical_of, self.experts.num_experts)

    def used(self, takes: Bools, is_draining: Bools) -> Int32s:
        """int32[places, layers, slots], the experts whose tokens each worker gets; EMPTY means none.

        A worker gets the tokens of what it holds, or, while it may not run, of what no other one holds that takes any.

        Args:
            takes: bool[places], whether the worker runs and may get tokens.
            is_draining: bool[places], whether it gets none, whatever it holds.
        """
        is_covered = any_of(self.held()[takes])
        layer = np.arange(len(is_covered))[None, :, None]
        is_alone = ~is_covered[layer, self.logical_of] & ~is_draining[:, None, None]
        return np.where(takes[:, None, None] | is_alone, self.logical_of, EMPTY)

    def alone(self, worker: int, others: Iterable[int]) -> tuple[int, int] | None:
        """(layer of the network, expert) that a worker holds and none of `others` does. None means no such expert."""
        held = self.held()
        is_alone = held[worker] & ~any_of(held[list(others)])
        if not is_alone.any():
            return None
        layer, expert = np.argwhere(is_alone)[0].tolist()
        return self.experts.layers[layer], expert

    def fill(self, worker: int, others: Iterable[int]) -> None:
        """Give an added worker as many experts as one has at the start: those with the fewest copies at `others`."""
        copies = self.held()[list(others)].sum(axis=0)
        num_experts = -(-self.experts.num_experts // self._num_shares)
        self.clear(worker)
        fewest = copies.argsort(axis=1, kind="stable")[:, :num_experts]
        self.logical_of[worker, :, :num_experts] = np.sort(fewest, axis=1)

    def clear(self, worker: int) -> None:
        """Empty the slots of a worker that is gone."""
        self.logical_of[worker] = EMPTY


def held_by(logical_of: Int32s, num_experts: int) -> Bools:
    """Compute which experts each worker holds, bool[workers, layers, experts].

    Args:
        logical_of: int32[workers, layers, slots], logical expert in each slot; EMPTY means none.
    """
    held = np.zeros((*logical_of.shape[:2], num_experts), np.bool_)
    worker, layer, slot = np.nonzero(logical_of != EMPTY)
    held[worker, layer, logical_of[worker, layer, slot]] = True
    return held


def any_of(held: Bools) -> Bools:
    """bool[layers, experts], which experts any of the workers of `held` has."""
    found: Bools = np.logical_or.reduce(held, axis=0)
    return found
