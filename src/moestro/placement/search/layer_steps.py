"""The steps that a search may take in one layer: swaps, moves, additions and removals of single copies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Steps = tuple[Ids, Ids]  # ids of the two edits of each step; the second is 0 where one edit is enough

NONE = -1  # the device that an edit neither takes from nor gives to


class LayerSteps:
    """Edits and steps of one layer's copies.

    An *edit* moves a copy of an expert to another device, removes one, or adds one. A *step* is one edit, or two edits
    of different experts that meet in one slot.

    Attributes:
        expert, device: int64[copies], each copy's expert and device.
        edits: int64[3, edits], each edit's expert, the device that loses a copy and the one that gets one. Edit 0
            changes nothing.
    """

    def __init__(self, holders: NDArray[np.bool_], slots: Ids) -> None:
        """Args: bool[experts, devices], and int64[devices], the slots of each device."""
        self._holders = holders
        self._num_devices: int = holders.shape[1]
        self._has_room = holders.sum(axis=0) < slots
        self._copies = holders.sum(axis=1)
        self.expert, self.device = np.nonzero(holders)
        self._first_removal = 1 + len(self.expert) * self._num_devices
        self._first_addition = self._first_removal + len(self.expert)
        self.edits = self._list_edits()

    def steps(self, busiest: Ids | None) -> Steps:
        """Return the steps that change one of the devices `busiest`; None means all steps."""
        expert, device, lacks = self.expert, self.device, ~self._holders
        is_spare = self._copies[expert] > 1
        is_near = np.ones(len(expert), np.bool_) if busiest is None else np.isin(device, busiest)
        near_experts = np.zeros(len(lacks), np.bool_)
        near_experts[expert[is_near]] = True
        either_near = is_near[:, None] | is_near
        fits = lacks[:, device][expert]  # [copies, copies], whether the first may come to the second's device
        one, two = np.nonzero(np.triu(fits & fits.T & either_near))
        swaps = (self._moved(one, device[two]), self._moved(two, device[one]))
        one, two = np.nonzero(fits.T & is_spare[:, None] & either_near)
        displaced = (self._removed(one), self._moved(two, device[one]))
        copy, more = np.nonzero(lacks.T[device] & is_spare[:, None] & (is_near[:, None] | near_experts))
        replaced = (self._removed(copy), self._added(more, device[copy]))
        alone = [
            self._moved(*np.nonzero(lacks[expert] & self._has_room & is_near[:, None])),
            self._removed(np.flatnonzero(is_spare & is_near)),
            self._added(*np.nonzero(lacks & self._has_room & near_experts[:, None])),
        ]
        num_alone = sum(map(len, alone))
        first = np.concatenate([*alone, swaps[0], displaced[0], replaced[0]])
        second = np.concatenate([np.zeros(num_alone, np.int64), swaps[1], displaced[1], replaced[1]])
        return first, second

    def in_order(
        self, moved: NDArray[np.float64], removed: NDArray[np.float64], added: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return a figure for each edit: [copies, devices], [copies] and [experts, devices] in the order of `edits`."""
        return np.concatenate([np.zeros(1), moved.ravel(), removed, added.ravel()])

    def joint_steps(self, steps: Steps, room: Ids) -> tuple[Ids, Ids]:
        """Return the pairs of steps that change different experts and together fit into the slots.

        Args:
            room: int64[devices], free slots.

        Returns:
            Indices of the two steps of each pair.
        """
        experts, lost, got = self.edits[:, np.stack(steps)]
        every = np.arange(len(steps[0]))
        filled = np.zeros((len(every), len(room) + 1), np.int64)  # the last column takes NONE
        is_changed = np.zeros((len(every), len(self._holders)), np.int64)
        for which, edit in enumerate(steps):
            np.add.at(filled, (every, lost[which]), -1)
            np.add.at(filled, (every, got[which]), 1)
            used = edit != 0
            is_changed[every[used], experts[which][used]] = 1
        fits = (filled[:, None, :-1] + filled[:, :-1] <= room).all(axis=2)
        one, other = np.nonzero(np.triu(fits & (is_changed @ is_changed.T == 0), 1))
        return one, other

    def _moved(self, copy: Ids, target: Ids) -> Ids:
        edit: Ids = 1 + copy * self._num_devices + target
        return edit

    def _removed(self, copy: Ids) -> Ids:
        edit: Ids = self._first_removal + copy
        return edit

    def _added(self, expert: Ids, target: Ids) -> Ids:
        edit: Ids = self._first_addition + expert * self._num_devices + target
        return edit

    def _list_edits(self) -> Ids:
        num_experts, num_devices = self._holders.shape
        num_copies = len(self.expert)
        nowhere = np.full(num_copies, NONE)
        nothing = np.array([[0], [NONE], [NONE]])
        targets = np.tile(np.arange(num_devices), max(num_copies, num_experts))
        moves = [
            np.repeat(self.expert, num_devices),
            np.repeat(self.device, num_devices),
            targets[: num_copies * num_devices],
        ]
        removals = [self.expert, self.device, nowhere]
        num_additions = num_experts * num_devices
        additions = [
            np.repeat(np.arange(num_experts), num_devices),
            np.full(num_additions, NONE),
            targets[:num_additions],
        ]
        return np.concatenate([nothing, np.stack(moves), np.stack(removals), np.stack(additions)], axis=1)
