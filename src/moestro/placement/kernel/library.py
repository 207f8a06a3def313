"""The compiled functions of the search on problems and placements, which they change in place as NumPy's code does."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY
from moestro.placement.copies import Packing, QueuedCopies
from moestro.placement.problem import Experts, PlaceProblem
from moestro.placement.traffic import Floats

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("num_batches", "num_experts", "num_devices", "num_slots")),
        *((name, _POINTER) for name in ("speed", "room", "row_s", "moved")),
        ("move_s", _FLOAT),
    )


class _Packing(ctypes.Structure):
    _fields_ = tuple((name, _POINTER) for name in ("expert", "share", "work", "held"))


# Name of each function without its prefix -> types of its arguments after the problem.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "best_exchanges": (_POINTER, _INT, *[_POINTER] * 6),
    "exchange": (_POINTER, _INT, _INT, *[_POINTER] * 4, _FLOAT, _INT, _POINTER),
    "pack": (*[_POINTER] * 7, *[_INT] * 3, *[_POINTER] * 2),
    "balance": (_POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT, _FLOAT),
}


class SearchKernel:
    """The compiled functions.

    Args:
        path: The compiled file.

    Raises:
        OSError: The file is no library of the kernel.
    """

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self._function: dict[str, ctypes._NamedFuncPointer] = {}
        for name, types in _SIGNATURES.items():
            try:
                function = loaded[f"moestro_{name}"]
            except AttributeError as error:
                raise OSError(f"{path} has no function {name}") from error
            function.argtypes, function.restype = (_POINTER, *types), None
            self._function[name] = function

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
        self._function["best_exchanges"](*_state(problem, packing), len(batch), *addresses)
        return best, gain

    def exchange(
        self,
        problem: PlaceProblem,
        packing: Packing,
        pairs: tuple[Experts, Experts, Experts],
        target: Floats,
        least_gain: float,
        *,
        one_each: bool,
    ) -> NDArray[np.bool_]:
        """Make the exchanges of `descent.exchange` without an allowance, and return what it returns."""
        has_gained = np.empty(len(pairs[0]), np.bool_)
        inputs = [np.ascontiguousarray(each) for each in (*pairs, target)]
        addresses = [each.ctypes.data for each in inputs]
        self._function["exchange"](
            *_state(problem, packing), *inputs[1].shape, *addresses, least_gain, one_each, has_gained.ctypes.data
        )
        return has_gained

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
        self._function["balance"](*_state(problem, packing), largest.ctypes.data, each.ctypes.data, *rounds)

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
        self._function["pack"](_stated(problem), *addresses, *sizes, copies.load.ctypes.data, expert.ctypes.data)
        return expert


def _state(problem: PlaceProblem, packing: Packing) -> tuple[ctypes._CArgObject, ctypes._CArgObject]:
    figures = (packing.expert, packing.share, packing.work, packing.held)
    return _stated(problem), ctypes.byref(_Packing(*(each.ctypes.data for each in figures)))


def _stated(problem: PlaceProblem) -> ctypes._CArgObject:
    row_s = None if problem.row_s is None else problem.row_s.ctypes.data
    arrays = (problem.speed.ctypes.data, problem.room.ctypes.data, row_s, problem.moved.ctypes.data)
    return ctypes.byref(_Problem(*problem.shape, *arrays, problem.move_s))
