"""Columns behind an `EngineTable`: one row per engine, written by the router, grown by doubling."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import ROUTED_FIGURES, LoadFigures
from moestro.core.views import (
    ALONE,
    DEFAULT_COPY_PRICE,
    NEVER_NS,
    OWN_COUNTS,
    TRAITS,
    UNKNOWN_KV_TOKENS,
    EngineTable,
    Figure,
)

Scalar = TypeVar("Scalar", bound=np.generic)

_FIRST_CAPACITY = 16


class RequestCounts(NamedTuple):
    """Columns of `EngineColumns`, for access to single numbers."""

    num_in_flight: memoryview
    num_prefilling: memoryview
    prefill_tokens: memoryview
    context_tokens: memoryview
    num_unseen: memoryview


class _Comparison(NamedTuple):
    """Result of `EngineColumns.compared`, and for which calls it holds.

    Attributes:
        routable: bytes of the column `routable`.
        since_ns, until_ns: first and last `since_ns` for which no figure is older or newer than it was.
    """

    routable: bytes
    since_ns: int
    until_ns: int
    table: EngineTable
    lacking: dict[str, NDArray[np.bool_]]


class EngineColumns:
    """Rows of engines, numbered from 0. Rows of removed engines are reused.

    Attributes:
        is_up: bool[n], whether the engine is in rotation, even with a full queue.
        block_tokens: int64[n], tokens of the engine's own KV blocks.
        table: read-only view of the rows for policies, in the same memory.
        no_hits: int64[n], read-only zeros: the cached tokens of a prompt for policies that do not ask for them.
        counts: the columns that change with single requests, in the same memory. NumPy takes twice as long to change a
            single number.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._free: list[int] = []
        self._comparison: _Comparison | None = None  # the last one, while it holds
        self._allocate(_FIRST_CAPACITY)

    def add(self) -> int:
        """Return a row for a new engine, not routable yet."""
        if self._free:
            row = self._free.pop()
        else:
            if self.num_rows == self._capacity:
                self._grow()
            row = self.num_rows
            self.num_rows += 1
            self._show()
        return row

    def give_back(self, row: int) -> None:
        """Free the row of a removed engine, which has no request in flight."""
        assert not self.is_up[row]
        assert not self.num_in_flight[row]
        self._free.append(row)

    def report(self, row: int, figures: LoadFigures, as_of_ns: int) -> set[str]:
        """Take in the reported figures that are no older than the known ones, and return their names."""
        taken, comparison = set(), self._comparison
        for at, name in enumerate(ROUTED_FIGURES):
            value = getattr(figures, name)
            if value is not None and as_of_ns >= (before_ns := self._as_of_ns[at, row]):
                if comparison is not None and before_ns < comparison.since_ns:
                    self._comparison = None  # a figure that was missing is known
                self._values[at, row] = value
                self._as_of_ns[at, row] = as_of_ns
                taken.add(name)
        return taken

    def compared(self, table: EngineTable, since_ns: int) -> tuple[EngineTable, dict[str, NDArray[np.bool_]]]:
        """Leave out the figures that some routable engines have reported since `since_ns` and others have not.

        An engine without a figure would be compared by the router's own count, which does not see what others send.

        Args:
            table: the table of these columns, or one with fewer routable rows.

        Returns:
            A table that shows these figures as never reported, and for each of them bool[n], the rows that lack it.
        """
        known = self._comparison
        if (
            known is None
            or table is not self.table
            or not known.since_ns <= since_ns <= known.until_ns
            or table.routable.tobytes() != known.routable
        ):
            known = self._compare(table, since_ns)
        return known.table, known.lacking

    def _compare(self, table: EngineTable, since_ns: int) -> _Comparison:
        routable, as_of_ns = table.routable, self._as_of_ns[:, : len(table)]
        is_lacking = (as_of_ns < since_ns) & routable
        num_lacking = np.count_nonzero(is_lacking, axis=1)
        uneven = np.flatnonzero((num_lacking > 0) & (num_lacking < np.count_nonzero(routable)))
        names = tuple(ROUTED_FIGURES[at] for at in uneven)
        found = _Comparison(
            routable=routable.tobytes(),
            since_ns=since_ns,
            until_ns=int(as_of_ns.min(where=(as_of_ns >= since_ns) & routable, initial=np.iinfo(np.int64).max)),
            table=table.unreported(names) if names else table,
            lacking={name: is_lacking[at] for name, at in zip(names, uneven, strict=True)},
        )
        if table is self.table:
            self._comparison = found
        return found

    def set_group(self, row: int, group: int) -> None:
        """Set the group with which an engine steps; ALONE means none."""
        had_groups = self.table.group is not None
        self.group[row] = group
        if had_groups or group != ALONE:
            self._show()

    def speeds_changed(self) -> None:
        """Note that the columns `speed` or `decode_speed` were written. Mostly all of them are 1 before and after."""
        if self.table.has_speeds != self._has_speeds():
            self._show()

    def _has_speeds(self) -> bool:
        n = self.num_rows
        return bool(np.count_nonzero(self.speed[:n] != 1) or np.count_nonzero(self.decode_speed[:n] != 1))

    def forget_figures(self, row: int) -> None:
        """Discard all figures reported for the row."""
        self._comparison = None
        self._values[:, row] = 0
        self._as_of_ns[:, row] = NEVER_NS

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self.is_up = np.zeros(capacity, np.bool_)
        self.routable = np.zeros(capacity, np.bool_)
        self.num_in_flight = np.zeros(capacity, np.int64)
        self.num_prefilling = np.zeros(capacity, np.int64)
        self.prefill_tokens = np.zeros(capacity, np.int64)
        self.context_tokens = np.zeros(capacity, np.int64)
        self.num_unseen = np.zeros(capacity, np.int64)
        self.reported_prefill_tokens = np.full(capacity, np.inf)
        self.num_foreign = np.zeros(capacity, np.int64)
        self.num_kv_tokens = np.full(capacity, UNKNOWN_KV_TOKENS)
        self.speed = np.ones(capacity, np.float64)
        self.decode_speed = np.ones(capacity, np.float64)
        self.copy_price = np.full(capacity, DEFAULT_COPY_PRICE)
        self.group = np.full(capacity, ALONE, np.int64)
        self.block_tokens = np.ones(capacity, np.int64)
        self.counts = RequestCounts(
            self.num_in_flight.data,
            self.num_prefilling.data,
            self.prefill_tokens.data,
            self.context_tokens.data,
            self.num_unseen.data,
        )
        self._values = np.zeros((len(ROUTED_FIGURES), capacity), np.float64)
        self._as_of_ns = np.full((len(ROUTED_FIGURES), capacity), NEVER_NS, np.int64)
        self._show()

    def _grow(self) -> None:
        names = (
            "is_up",
            "routable",
            "reported_prefill_tokens",
            *TRAITS,
            "block_tokens",
            "_values",
            "_as_of_ns",
            *OWN_COUNTS,
        )
        old, num_rows = {name: getattr(self, name) for name in names}, self._capacity
        self._allocate(2 * num_rows)
        for name, column in old.items():
            getattr(self, name)[..., :num_rows] = column

    def _show(self) -> None:
        """Rebuild the table over the current rows."""
        self._comparison = None
        n = self.num_rows
        columns: dict[str, Any] = {
            name: Figure(_read_only(values, n), _read_only(as_of_ns, n))
            for name, values, as_of_ns in zip(ROUTED_FIGURES, self._values, self._as_of_ns, strict=True)
        }
        columns |= {
            name: _read_only(getattr(self, name), n)
            for name in ("routable", "reported_prefill_tokens", *TRAITS, *OWN_COUNTS)
        }
        if not np.count_nonzero(self.group[:n] != ALONE):
            columns["group"] = None  # so that policies need not look
        self.table = EngineTable(**columns, has_speeds=self._has_speeds())
        self.no_hits = _read_only(np.zeros(n, np.int64), n)


def _read_only(column: NDArray[Scalar], num_rows: int) -> NDArray[Scalar]:
    view = column[:num_rows]
    view.flags.writeable = False
    return view
