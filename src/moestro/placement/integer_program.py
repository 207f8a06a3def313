"""A mixed-integer linear program, built row by row and solved by HiGHS. scipy is loaded when one is solved."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from moestro.errors import ConfigError

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class IntegerProgram:
    """Minimises a linear cost of variables under linear constraints.

    Attributes:
        purpose: who needs the solver, for messages.
    """

    purpose: str
    _costs: list[Floats] = field(default_factory=list)
    _uppers: list[Floats] = field(default_factory=list)
    _is_integer: list[NDArray[np.int64]] = field(default_factory=list)
    _entries: list[tuple[Ids, Ids, Floats]] = field(default_factory=list)  # row, variable, factor
    _bounds: list[tuple[Floats, Floats]] = field(default_factory=list)  # lower, upper
    _num_variables: int = 0
    _num_rows: int = 0

    def binaries(self, *shape: int, cost: float = 0.0) -> Ids:
        """Add variables that are 0 or 1; returns their ids in this shape."""
        return self._add(shape, 1.0, cost, 1)

    def continuous(self, *shape: int, upper: float = np.inf, cost: float = 0.0) -> Ids:
        """Add variables from 0 to `upper`; returns their ids in this shape."""
        return self._add(shape, upper, cost, 0)

    def constrain(self, ids: Ids, factors: Floats | float, lower: Floats | float, upper: Floats | float) -> None:
        """Add one row for each entry of the leading axis: lower <= sum of factors * variables <= upper.

        Args:
            ids: int64[rows, terms].
            factors: what `ids` are multiplied with; broadcast to their shape.
            lower, upper: float64[rows], or one for all.
        """
        rows = np.repeat(np.arange(len(ids)) + self._num_rows, ids.shape[1])
        self._entries.append((rows, ids.ravel(), np.broadcast_to(factors, ids.shape).astype(np.float64).ravel()))
        self._bounds.append((_row_bounds(lower, len(ids)), _row_bounds(upper, len(ids))))
        self._num_rows += len(ids)

    def solve(self, time_limit_s: float) -> Floats:
        """Return the value of each variable at the optimum.

        Raises:
            ConfigError: scipy is not installed.
            ValueError: The constraints contradict each other, or the time ended before an optimum was proven.
        """
        try:
            optimize, sparse = import_module("scipy.optimize"), import_module("scipy.sparse")
        except ImportError:
            raise ConfigError(f"{self.purpose} needs scipy: pip install 'moestro[exact]'") from None
        rows, ids, factors = (np.concatenate(column) for column in zip(*self._entries, strict=True))
        matrix = sparse.coo_array((factors, (rows, ids)), shape=(self._num_rows, self._num_variables)).tocsr()
        lower, upper = (np.concatenate(column) for column in zip(*self._bounds, strict=True))
        found = optimize.milp(
            np.concatenate(self._costs),
            integrality=np.concatenate(self._is_integer),
            bounds=optimize.Bounds(0.0, np.concatenate(self._uppers)),
            constraints=optimize.LinearConstraint(matrix, lower, upper),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )
        if found.status != 0:
            raise ValueError(f"{self.purpose} found no optimum within {time_limit_s:g} s: {found.message}")
        values: Floats = found.x
        return values

    def _add(self, shape: tuple[int, ...], upper: float, cost: float, is_integer: int) -> Ids:
        count = int(np.prod(shape))
        ids = np.arange(self._num_variables, self._num_variables + count, dtype=np.int64)
        self._costs.append(np.full(count, cost))
        self._uppers.append(np.full(count, upper))
        self._is_integer.append(np.full(count, is_integer, np.int64))
        self._num_variables += count
        return ids.reshape(shape)


def _row_bounds(bound: Floats | float, num_rows: int) -> Floats:
    return np.broadcast_to(np.asarray(bound, np.float64), num_rows)
