"""Which code a search runs: the compiled kernel where it is found, else NumPy's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import numpy as np

from moestro.core.experts.expert_table import EMPTY
from moestro.native.compiler import PLACEMENT_KERNEL, PLAIN
from moestro.native.functions import DOUBLE, INT, POINTER, load_functions
from moestro.native.library_search import LibrarySearch
from moestro.placement.contract import Floats
from moestro.placement.search.problem import Experts, Packing, PlaceProblem, QueuedCopies, StepPrices


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_batches", "num_experts", "num_devices", "num_slots")),
        *((name, POINTER) for name in ("speed", "room", "row_s", "moved")),
        ("move_s", DOUBLE),
    )


class _Packing(ctypes.Structure):
    _fields_ = tuple((name, POINTER) for name in ("expert", "share", "work", "held"))


_STEP_ARRAYS = ("work_s", "near_s", "sooner_s", "rest_s", "speed", "node_at", "room", "moved")


class _StepPrices(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_layers", "num_experts", "num_devices", "num_slots")),
        *((name, POINTER) for name in _STEP_ARRAYS),
        ("move_s", DOUBLE),
        ("may_receive", INT),
    )


_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "best_exchanges": (POINTER, POINTER, INT, *[POINTER] * 6),
    "pack": (*[POINTER] * 8, *[INT] * 3, *[POINTER] * 2),
    "balance": (*[POINTER] * 4, INT, INT, DOUBLE, DOUBLE),
    "lower_prices": (POINTER, POINTER, INT, INT, INT, DOUBLE, POINTER),
}


class SearchKernel:
    """The compiled functions.

    Args:
        path: The compiled file.

    Raises:
        OSError: The file is no library of the kernel.
    """

    def __init__(self, path: Path) -> None:
        self._function = load_functions(path, _ARGUMENTS)

    def best_exchanges(
        self, problem: PlaceProblem, packing: Packing, batch: Experts, devices: Experts, floor: Floats
    ) -> tuple[Experts, Floats]:
        """Return the slots of the best exchange of each pair, int64[2, pairs], and what it gains, float64[pairs].

        Args:
            batch: int64[pairs].
            devices: int64[2, pairs].
            floor: float64[pairs], seconds.
        """
        best, gain = np.empty(devices.shape, np.int64), np.empty(len(batch))
        inputs = [np.ascontiguousarray(each) for each in (batch, devices[0], devices[1], floor)]
        addresses = [each.ctypes.data for each in (*inputs, best, gain)]
        self._function["best_exchanges"](*_structs(problem, packing), len(batch), *addresses)
        return best, gain

    def balance(
        self,
        problem: PlaceProblem,
        packing: Packing,
        largest: Floats,
        each: Floats,
        rounds: tuple[int, int, float, float],
    ) -> None:
        """Make the rounds of `descent.balance` without an allowance.

        Args:
            largest, each: Fields of the goal.
            rounds: Their number, and `CYCLE`, `SLOW` and `LEAST_GAIN` of `descent`.
        """
        largest, each = np.ascontiguousarray(largest), np.ascontiguousarray(each)
        self._function["balance"](*_structs(problem, packing), largest.ctypes.data, each.ctypes.data, *rounds)

    def pack(self, problem: PlaceProblem, room: Experts, copies: QueuedCopies) -> Experts:
        """Place copies as `packing._place` does, and return what it returns.

        Args:
            room: int64[devices], slots of each device.
            copies: What is placed; its `load` is changed.
        """
        expert = np.full((problem.shape[0], *problem.room.shape), EMPTY, np.int64)
        inputs = (copies.items, copies.item_work, copies.stay_s, copies.far_s, copies.adds, copies.joining_s, room)
        arrays = [None if each is None else np.ascontiguousarray(each) for each in inputs]
        addresses = [None if each is None else each.ctypes.data for each in arrays]
        sizes = (copies.items.shape[1], copies.adds.shape[1], int(problem.speed.min() != problem.speed.max()))
        self._function["pack"](
            _problem_struct(problem), *addresses, *sizes, copies.load.ctypes.data, expert.ctypes.data
        )
        return expert

    def lower_prices(self, prices: StepPrices, starts: Experts, limits: tuple[int, int, float]) -> Experts:
        """Take the steps of `by_price.lower_prices`, and return what it returns.

        Args:
            starts: int64[starts, layers, devices, slots].
            limits: Starts of a layer from which steps are taken, steps from each, and `LEAST_GAIN` of `by_price`.
        """
        num_layers, num_experts, num_devices = prices.near_s.shape
        arrays = [np.ascontiguousarray(getattr(prices, name)) for name in _STEP_ARRAYS]
        addresses = [each.ctypes.data for each in arrays]
        sizes = (num_layers, num_experts, num_devices, starts.shape[3])
        struct = _StepPrices(*sizes, *addresses, prices.move_s, int(prices.may_receive))
        starts = np.ascontiguousarray(starts)
        best: Experts = np.empty_like(starts[0])
        self._function["lower_prices"](ctypes.byref(struct), starts.ctypes.data, len(starts), *limits, best.ctypes.data)
        return best


def _structs(problem: PlaceProblem, packing: Packing) -> tuple[ctypes._CArgObject, ctypes._CArgObject]:
    figures = (packing.expert, packing.share, packing.work, packing.held)
    return _problem_struct(problem), ctypes.byref(_Packing(*(each.ctypes.data for each in figures)))


def _problem_struct(problem: PlaceProblem) -> ctypes._CArgObject:
    row_s = None if problem.row_s is None else problem.row_s.ctypes.data
    arrays = (problem.speed.ctypes.data, problem.room.ctypes.data, row_s, problem.moved.ctypes.data)
    return ctypes.byref(_Problem(*problem.shape, *arrays, problem.move_s))


_is_left_out = ContextVar("is_left_out", default=False)


@cache
def kernel_search() -> LibrarySearch[SearchKernel]:
    """Return the search for the kernel of this process, which begins with the first call."""
    return LibrarySearch(PLACEMENT_KERNEL, PLAIN, SearchKernel)


def search_kernel() -> SearchKernel | None:
    """Return the compiled kernel. None means that NumPy computes: it is absent, or is still being compiled."""
    return None if _is_left_out.get() else kernel_search().look()


def end_search(timeout_s: float) -> None:
    """Wait for a compilation that has begun, so that the next process finds the kernel; else each would begin one."""
    if kernel_search.cache_info().currsize:
        kernel_search().wait(timeout_s)


@contextmanager
def without_kernel() -> Iterator[None]:
    """Let NumPy compute in the block, in this thread."""
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)
