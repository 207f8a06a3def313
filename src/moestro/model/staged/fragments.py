"""Units that are computed together, with what layers take of them besides hidden states.

Units enter the network at layer 0. Units that stay together use the arguments of their entry. Another fragment of them,
or a mixture with others, reads the arguments in the arena by row and builds only its paged attention. The arena gets
them when the first such fragment is made, so units that are never parted cost no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from moestro.core.work import Int32s, Units
from moestro.model.pools import KVPools
from moestro.model.staged.arena import Arena, Index
from moestro.model.staged.staged_network import StagedNetwork
from moestro.model.step import PagedStep

_NUM_KNOWN = 8  # fragments that return in the next layer: one that runs, a few that are parked


class Fragment:
    """Some units inside the network.

    Args:
        step: the units' paged step.
        rows: rows of their tokens.
        staged: the network.
        arena: memory of these rows.

    Attributes:
        step, rows: as above.
        columns: [tokens, *sizes] of each column of the network's `TokenForm`, of units that have just entered. None
            means that the arena has them.
    """

    def __init__(self, step: PagedStep, rows: Index, staged: StagedNetwork, arena: Arena) -> None:
        self.step, self.rows = step, rows
        self.columns: list[Tensor] | None = None
        self._staged, self._arena = staged, arena
        self._by_kind: dict[int, dict[str, Any]] = {}
        self._chosen: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of the units' tokens."""
        return len(self.step.positions)

    def arguments(self, layer: int) -> dict[str, Any]:
        """Keyword arguments of a layer."""
        kind = self._staged.arguments.kind_of[layer]
        if kind not in self._by_kind:
            self._by_kind[kind] = self._staged.arguments.fill(kind, self.column, self.step)
        return self._by_kind[kind]

    @property
    def chosen(self) -> Tensor | None:
        """int64[tokens, layers with experts, k], in place of the gates' choices; None means that the gates choose."""
        column = self._staged.chosen_column
        if column is not None and self._chosen is None:
            self._chosen = self.column(column)
        return self._chosen

    def column(self, number: int) -> Tensor:
        """[tokens, *sizes], one of the columns of the network's `TokenForm`."""
        if self.columns is not None:
            return self.columns[number]
        return self._arena.read_column(number, self.rows)


class _Known(NamedTuple):
    units: Units
    rows: Int32s
    fragment: Fragment


class Fragments:
    """Makes fragments, and keeps the latest, because the same units return as the same object in the next layer.

    Args:
        staged: the network.
        pools: its KV cache.
        arena: memory of the tokens inside the network.
    """

    def __init__(self, staged: StagedNetwork, pools: KVPools, arena: Arena) -> None:
        self._staged, self._pools, self._arena = staged, pools, arena
        self._known: OrderedDict[int, _Known] = OrderedDict()  # by the id of `Units`, which are kept and so unique
        # Fragments whose arguments are not in the arena, in the order of their entry: rows of an earlier one that left
        # may be those of a later one.
        self._unwritten: list[Fragment] = []

    def enter(self, units: Units, rows: Int32s) -> tuple[Fragment, Tensor]:
        """Embed tokens, and keep their arguments.

        Returns:
            Their fragment, and the input of layer 0 [tokens, hidden size].
        """
        self.forget(units)
        fragment = self._make(units, rows)
        entered = self._staged.enter(fragment.step)
        fragment.columns = entered.columns
        self._unwritten.append(fragment)
        if len(self._unwritten) > _NUM_KNOWN:
            self._write()
        return fragment, entered.hidden

    def get(self, units: Units, rows: Int32s) -> Fragment:
        """Get the fragment of units that entered before, in whatever fragments."""
        known = self._known.get(id(units))
        if known is not None and (known.rows is rows or np.array_equal(known.rows, rows)):
            self._known.move_to_end(id(units))
            return known.fragment
        self._write()
        return self._make(units, rows)

    def _make(self, units: Units, rows: Int32s) -> Fragment:
        step = PagedStep(units, self._pools, self._staged.network.device)
        fragment = Fragment(step, self._arena.index(rows), self._staged, self._arena)
        self._known[id(units)] = _Known(units, rows, fragment)
        if len(self._known) > _NUM_KNOWN:
            self._known.popitem(last=False)
        return fragment

    def _write(self) -> None:
        """Store the arguments of all units in the arena."""
        for fragment in self._unwritten:
            assert fragment.columns is not None, "only what entered is unwritten"
            self._arena.write_columns(fragment.rows, fragment.columns)
        self._unwritten.clear()

    def arguments_at(self, layer: int, rows: Index) -> dict[str, Any]:
        """Keyword arguments of a layer whose attention is not run, for the tokens at `rows`."""
        self._write()
        arguments = self._staged.arguments
        return arguments.fill(arguments.kind_of[layer], lambda column: self._arena.read_column(column, rows), None)

    def forget(self, units: Units) -> None:
        """Forget the fragment of units that left the network."""
        known = self._known.pop(id(units), None)
        if known is not None and known.fragment in self._unwritten:
            self._unwritten.remove(known.fragment)
