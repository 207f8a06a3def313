"""Which code a search runs: the compiled kernel where it is found, else NumPy's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import EMPTY
from moestro.native.compiler import PLACEMENT_KERNEL
from moestro.native.library_search import DOUBLE, INT, POINTER, OptionalKernel, load_functions
from moestro.placement.contract import Floats
from moestro.placement.search.problem import Experts, Packing, PlaceProblem, QueuedCopies, StepPrices


def _fields(*kinds: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a structure in order, by their types; names are separated by blanks."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class _Stage(ctypes.Structure):
    """A structure for the kernel, which keeps the arrays alive to which it points."""

    arrays: dict[str, NDArray[np.generic]]

    @classmethod
    def of(cls, **values: NDArray[np.generic] | float | None) -> Self:
        """Make one of its fields; an array that is not contiguous is copied, so the kernel cannot change it."""
        arrays = {name: np.ascontiguousarray(each) for name, each in values.items() if isinstance(each, np.ndarray)}
        made = cls(**(values | {name: each.ctypes.data for name, each in arrays.items()}))
        made.arrays = arrays
        return made


class _Problem(_Stage):
    _fields_ = _fields(
        (INT, "num_batches num_experts num_devices num_slots"), (POINTER, "speed room row_s moved"), (DOUBLE, "move_s")
    )


class _Packing(_Stage):
    _fields_ = _fields((POINTER, "expert share work held"))


class _CopyCounts(_Stage):
    _fields_ = _fields(
        (POINTER, "token_s idle log_idle"), (DOUBLE, "expert_s may_cost"), (POINTER, "counts"), (INT, "num_extra")
    )


class _Queue(_Stage):
    _fields_ = _fields(
        (POINTER, "items item_work stay_s far_s adds joining_s room load expert"),
        (INT, "num_copies num_joined has_speeds"),
    )


class _Pairs(_Stage):
    _fields_ = _fields((POINTER, "batch one other floor best_slots gain"), (INT, "num_pairs"))


class _Levels(_Stage):
    _fields_ = _fields(
        (POINTER, "largest each token_s idle log_idle"),
        (DOUBLE, "expert_s slow least_gain stalled ridge kept"),
        (INT, "num_rounds cycle num_parts num_share_steps"),
    )


class _Turns(_Stage):
    _fields_ = _fields((POINTER, "cap"), (DOUBLE, "least_gain"), (INT, "num_turns"))


_STEP_ARRAYS = "work_s near_s sooner_s rest_s speed node_at room moved"


class _StepPrices(_Stage):
    _fields_ = _fields(
        (INT, "num_layers num_experts num_devices num_slots"),
        (POINTER, _STEP_ARRAYS),
        (DOUBLE, "move_s"),
        (INT, "may_receive"),
        (POINTER, "starts best"),
        (INT, "num_starts num_best num_steps"),
        (DOUBLE, "least_gain"),
    )


class _Search(ctypes.Structure):
    _fields_ = _fields((POINTER, "problem packing counts queue pairs levels turns steps"))


class SearchKernel:
    """The compiled search. Each method calls its one function with a stage of the search.

    Args:
        path: The compiled file.

    Raises:
        OSError: The file is no library of the kernel.
    """

    def __init__(self, path: Path) -> None:
        self._search = load_functions(path, {"search": (POINTER,)})["search"]

    def copy_counts(self, problem: PlaceProblem, num_extra: int, may_cost: float) -> Experts:
        """Return what `replicas.copy_counts` returns.

        Args:
            num_extra: Copies of all experts beyond one each, at most.
            may_cost: Its `COPIES_MAY_COST`.
        """
        found = np.empty(problem.token_s.shape, np.int64)
        counts = _CopyCounts.of(
            token_s=problem.token_s,
            idle=problem.idle,
            log_idle=problem.log_idle(),
            expert_s=problem.expert_s,
            may_cost=may_cost,
            counts=found,
            num_extra=num_extra,
        )
        self._run(problem=_problem_struct(problem), counts=counts)
        return found

    def pack(self, problem: PlaceProblem, room: Experts, copies: QueuedCopies) -> Experts:
        """Place copies as `packing._place` does, and return what it returns.

        Args:
            room: int64[devices], slots of each device.
            copies: What is placed; its `load` is changed.
        """
        expert = np.full((problem.shape[0], *problem.room.shape), EMPTY, np.int64)
        queue = _Queue.of(
            items=copies.items,
            item_work=copies.item_work,
            stay_s=copies.stay_s,
            far_s=copies.far_s,
            adds=copies.adds,
            joining_s=copies.joining_s,
            room=room,
            load=copies.load,
            expert=expert,
            num_copies=copies.items.shape[1],
            num_joined=copies.adds.shape[1],
            has_speeds=int(problem.speed.min() != problem.speed.max()),
        )
        self._run(problem=_problem_struct(problem), queue=queue)
        return expert

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
        one, other = devices
        arrays = {"batch": batch, "one": one, "other": other, "floor": floor, "best_slots": best, "gain": gain}
        pairs = _Pairs.of(**arrays, num_pairs=len(batch))
        self._run(problem=_problem_struct(problem), packing=_packing_struct(packing), pairs=pairs)
        return best, gain

    def level(self, problem: PlaceProblem, packing: Packing, goal: tuple[Floats, Floats], **numbers: float) -> None:
        """Make rounds of `packing.balance`, then steps of `replicas.share_out`, in each of some parts.

        Args:
            goal: Fields of `packing.Goal`, or `share_out`'s target twice.
            numbers: Fields of `Levels` in the kernel; those that are left out are 0.
        """
        levels = _Levels.of(
            largest=goal[0],
            each=goal[1],
            token_s=problem.token_s,
            idle=problem.idle,
            log_idle=problem.log_idle(),
            expert_s=problem.expert_s,
            **numbers,
        )
        self._run(problem=_problem_struct(problem), packing=_packing_struct(packing), levels=levels)

    def bring_near(
        self, problem: PlaceProblem, packing: Packing, cap: Floats, num_turns: int, least_gain: float
    ) -> None:
        """Make the turns of `packing.bring_near` without an allowance.

        Args:
            cap: float64[batches], load that no device may exceed for it.
            num_turns: Rotations at most.
            least_gain: `LEAST_GAIN` of `packing`.
        """
        turns = _Turns.of(cap=cap, num_turns=num_turns, least_gain=least_gain)
        self._run(problem=_problem_struct(problem), packing=_packing_struct(packing), turns=turns)

    def lower_prices(self, prices: StepPrices, starts: Experts, limits: tuple[int, int, float]) -> Experts:
        """Take the steps of `by_price.lower_prices`, and return what it returns.

        Args:
            starts: int64[starts, layers, devices, slots].
            limits: Starts of a layer from which steps are taken, steps from each, and `LEAST_GAIN` of `by_price`.
        """
        num_layers, num_experts, num_devices = prices.near_s.shape
        best: Experts = np.empty(starts.shape[1:], np.int64)
        arrays = {name: getattr(prices, name) for name in _STEP_ARRAYS.split()}
        steps = _StepPrices.of(
            num_layers=num_layers,
            num_experts=num_experts,
            num_devices=num_devices,
            num_slots=starts.shape[3],
            **arrays,
            move_s=prices.move_s,
            may_receive=int(prices.may_receive),
            starts=starts,
            best=best,
            num_starts=len(starts),
            num_best=limits[0],
            num_steps=limits[1],
            least_gain=limits[2],
        )
        self._run(steps=steps)
        return best

    def _run(self, **stages: _Stage) -> None:
        """Call the function. Stages that are not named do nothing."""
        self._search(ctypes.byref(_Search(**{name: ctypes.addressof(each) for name, each in stages.items()})))


def _problem_struct(problem: PlaceProblem) -> _Problem:
    sizes = dict(zip(("num_batches", "num_experts", "num_devices", "num_slots"), problem.shape, strict=True))
    arrays = {"speed": problem.speed, "room": problem.room, "row_s": problem.row_s, "moved": problem.moved}
    return _Problem.of(**sizes, **arrays, move_s=problem.move_s)


def _packing_struct(packing: Packing) -> _Packing:
    return _Packing.of(expert=packing.expert, share=packing.share, work=packing.work, held=packing.held)


placement_kernel = OptionalKernel(PLACEMENT_KERNEL, SearchKernel)
