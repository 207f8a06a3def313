"""Changes of engines that operators have made, which also hold for engines that a list names later or again."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np


class ChangeMade(StrEnum):
    """A change that an operator makes to an engine."""

    ADD = "add"
    REMOVE = "remove"
    DRAIN = "drain"
    RESUME = "resume"


class OperatorChange(msgspec.Struct, frozen=True):
    """A change that an operator has made.

    Attributes:
        target: name of the engine, or of an address with several.
        url: NAME=URL of an added engine; empty for other changes.
    """

    made: ChangeMade
    target: str
    url: str = ""


_SWITCHES = frozenset({ChangeMade.DRAIN, ChangeMade.RESUME})


def in_effect(changes: Sequence[OperatorChange]) -> list[OperatorChange]:
    """Return the changes without those that a later one of the same name replaces: a removal replaces all of them."""
    kept: list[OperatorChange] = []
    later: set[tuple[str, bool]] = set()
    removed: set[str] = set()
    for change in reversed(changes):
        kind = (change.target, change.made in _SWITCHES)
        if change.target in removed or (kind in later and change.made is not ChangeMade.REMOVE):
            continue
        later.add(kind)
        if change.made is ChangeMade.REMOVE:
            removed.add(change.target)
        kept.append(change)
    return kept[::-1]


def leave_drained(changes: Iterable[OperatorChange], name: str, address: str) -> bool:
    """Return whether changes, in their order, leave an engine drained: by its own name or that of its address."""
    is_drained = False
    for change in changes:
        if change.target in (name, address) and change.made is not ChangeMade.ADD:
            is_drained = change.made is ChangeMade.DRAIN
    return is_drained


def leave_removed(changes: Iterable[OperatorChange]) -> set[str]:
    """Return the names that changes, in their order, leave removed: those that were not added again."""
    removed: set[str] = set()
    for change in changes:
        if change.made is ChangeMade.REMOVE:
            removed.add(change.target)
        elif change.made is ChangeMade.ADD:
            removed.discard(change.target)
    return removed


_HALF_BYTES = 1 << 20  # tens of thousands of changes; memory that is not written takes no room
_HEAD_BYTES = 8
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[OperatorChange]).decode


class OperatorChanges:
    """The operators' changes that are in effect, in memory that all processes of a router inherit.

    The list outlives the process of the admin plane, its only writer, and workers read it without that process. One
    half of the memory has the list while the other half is written, so that a writer may die at any time.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD_BYTES + 2 * _HALF_BYTES)
        self._version = np.frombuffer(self._memory, "u8", 1)
        self._known: tuple[int, list[OperatorChange]] = (0, [])  # the version that was read last

    def read(self) -> list[OperatorChange]:
        """Return the changes, oldest first; callers must not change the list."""
        while True:
            version = int(self._version[0])
            if version == self._known[0]:
                return self._known[1]
            at = _HEAD_BYTES + version % 2 * _HALF_BYTES
            num_bytes = int.from_bytes(self._memory[at : at + _HEAD_BYTES], "little")
            begin = at + _HEAD_BYTES
            packed = self._memory[begin : begin + min(num_bytes, _HALF_BYTES)]
            if int(self._version[0]) == version:
                self._known = (version, _decode(packed) if packed else [])

    def write(self, changes: Sequence[OperatorChange]) -> None:
        """Replace the changes. Those without effect are left out, and so are the oldest ones beyond a megabyte."""
        kept = in_effect(changes)
        while len(packed := _encode(kept)) > _HALF_BYTES - _HEAD_BYTES:
            del kept[: len(kept) // 8 + 1]
        version = int(self._version[0]) + 1
        at = _HEAD_BYTES + version % 2 * _HALF_BYTES
        self._memory[at : at + _HEAD_BYTES + len(packed)] = len(packed).to_bytes(_HEAD_BYTES, "little") + packed
        self._version[0] = version
