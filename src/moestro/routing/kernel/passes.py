"""The compiled passes of a decision: their library, and the addresses of the columns that they read."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import EngineTable, Figure
from moestro.native.compiler import ROUTE_KERNEL
from moestro.native.library_search import DOUBLE, INT, POINTER, OptionalKernel, load_functions

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "delays": (POINTER, POINTER, POINTER),
    "products": (POINTER, POINTER, DOUBLE, POINTER),
    "lowest": (POINTER, POINTER, INT),
    "holders": (POINTER, DOUBLE, POINTER, INT),
    "is_lower": (POINTER, POINTER, DOUBLE, POINTER, INT),
    "fill": (POINTER, ctypes.c_char_p, INT, DOUBLE),
}
_RESULTS = dict.fromkeys(("delays", "products", "lowest", "holders", "is_lower"), INT)
_COLUMNS = (
    "num_in_flight", "num_prefilling", "prefill_tokens", "reported_prefill_tokens", "num_kv_tokens", "speed",
    "decode_speed", "copy_price", "num_foreign", "kv_usage", "expert_pressure",
)  # fmt: skip
_MOST_TABLES = 16  # of the routers of a simulation, and those without some engines
_byte_at = ctypes.c_char.from_buffer


class _DelayTerms(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("hits", "hosted", "work")),
        ("num_work", INT),
        *((name, DOUBLE) for name in ("known", "answer", "decode_weight", "least_weight", "per_work")),
        *((name, INT) for name in ("oldest_ns", "has_speeds")),
    ]


def _address(column: NDArray[Any]) -> int:
    """Return the address of a column. One that may be written gives it in a third of the time."""
    try:
        return ctypes.addressof(_byte_at(column))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return int(column.ctypes.data)


def _is_plain(column: NDArray[Any]) -> bool:
    return column.dtype.char == "d" and column.flags.c_contiguous


class _Table:
    """The addresses of a table's columns, which hold while the table is kept here."""

    def __init__(self, table: EngineTable) -> None:
        self.table = table
        columns: list[NDArray[Any]] = []
        for each in (getattr(table, name) for name in _COLUMNS):
            columns += (each.values, each.as_of_ns) if isinstance(each, Figure) else (each,)
        self.is_usable = all(each.dtype.char in "dl" and each.flags.c_contiguous for each in columns)
        self.struct = (INT * (1 + len(columns)))(len(table), *(each.ctypes.data for each in columns))
        self.address = ctypes.addressof(self.struct)
        self.routable = int(table.routable.ctypes.data)
        self._addresses = {id(each): each.ctypes.data for each in columns}

    def address_of(self, column: NDArray[Any]) -> int:
        """Return the address of an array, which may be one of the table's columns: those cannot be written."""
        return self._addresses.get(id(column)) or _address(column)


class RouteKernel:
    """The compiled passes. A method returns None where its pass does not apply, and NumPy's code decides.

    Args:
        path: the compiled file.

    Raises:
        OSError: the file is no library of the kernel.
    """

    def __init__(self, path: Path) -> None:
        functions = load_functions(path, _FUNCTIONS, _RESULTS)
        self._delays, self._products, self._lowest = (functions[name] for name in ("delays", "products", "lowest"))
        self._holders, self._is_lower, self._fill = (functions[name] for name in ("holders", "is_lower", "fill"))
        self._tables: dict[int, _Table] = {}  # by identity
        self._terms = _DelayTerms()
        self._terms_at = ctypes.addressof(self._terms)

    def delays(
        self,
        table: EngineTable,
        columns: tuple[Floats, Floats | None, Floats],
        numbers: tuple[float, float, float, float, float],
        oldest_ns: int,
    ) -> Floats | None:
        """Return the scores of the policy `moestro`, float64[n].

        Args:
            columns: cached tokens, those in host memory alone, and recent work of each engine.
            numbers: tokens of the request, mean tokens of an answer, the two weights, and the inverse of mean work.
            oldest_ns: time from which a reported figure counts.
        """
        hits, hosted, work = columns
        known, terms = self._of(table), self._terms
        if not (known.is_usable and _is_plain(hits) and (hosted is None or _is_plain(hosted))):
            return None
        scores = np.empty(len(hits))
        terms.hits, terms.work, terms.num_work = _address(hits), _address(work), len(work)
        terms.hosted = None if hosted is None else _address(hosted)
        terms.known, terms.answer, terms.decode_weight, terms.least_weight, terms.per_work = numbers
        terms.oldest_ns, terms.has_speeds = oldest_ns, table.has_speeds
        return scores if self._delays(known.address, self._terms_at, _address(scores)) else None

    def products(self, table: EngineTable, hits: Floats, num_known_tokens: int) -> Floats | None:
        """Return the scores of the policy `lmetric`, float64[n]."""
        known = self._of(table)
        if not (known.is_usable and _is_plain(hits)):
            return None
        scores = np.empty(len(hits))
        return scores if self._products(known.address, _address(hits), num_known_tokens, _address(scores)) else None

    def lowest(self, table: EngineTable, scores: NDArray[Any], among: Mask) -> int:
        """Return the row of the only lowest finite score among the rows of a set; -1 where NumPy's code decides."""
        if not _is_plain(scores):
            return -1
        known = self._of(table)
        mask = known.routable if among is table.routable else _address(among)
        return int(self._lowest(known.address_of(scores), mask, len(scores)))

    def holders(self, table: EngineTable, hits: Floats, num_tokens: int) -> tuple[int, int] | None:
        """Return how many routable engines have so many tokens of a prompt, and how many have not."""
        if not _is_plain(hits):
            return None
        packed = self._holders(_address(hits), num_tokens, self._of(table).routable, len(hits))
        has = packed >> 32
        return has, (packed & 0xFFFFFFFF) - has

    def is_lower(self, table: EngineTable, scores: NDArray[Any], hits: Floats, num_tokens: int) -> bool | None:
        """Return whether the lowest score of the routable engines with so many tokens is below that of the others."""
        if not (_is_plain(scores) and _is_plain(hits)):
            return None
        mask = self._of(table).routable
        return bool(self._is_lower(_address(scores), _address(hits), num_tokens, mask, len(hits)))

    def fill(self, column: Floats, sets: list[tuple[int, int]], unit: int) -> None:
        """Write `unit` times a number to the rows of each set of `sets`, (number, bit mask of rows), in their order."""
        at, num = _address(column), len(column)
        num_bytes = -(-num // 8)
        for number, rows in sets:
            self._fill(at, rows.to_bytes(num_bytes, "little"), num, number * unit)

    def _of(self, table: EngineTable) -> _Table:
        known = self._tables.get(id(table))
        if known is None:
            if len(self._tables) == _MOST_TABLES:
                self._tables.clear()
            known = self._tables[id(table)] = _Table(table)
        return known


route_kernel = OptionalKernel(ROUTE_KERNEL, RouteKernel, is_wanted=False)
