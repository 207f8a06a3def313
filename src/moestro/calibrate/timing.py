"""Measures work items on a real device, and the rank's own work around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request, SamplingParams
from moestro.core.work import BlockMoves, Device, Forward, StepResult
from moestro.cost.tables import HostTimes
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings

_MOST_REPEATS, _ENOUGH_NS = 5, 20_000_000  # for one item in one round; short items repeat more often
_HOST_STEPS = 200
Times = NDArray[np.int64]


def once_ns(device: Device, item: Forward) -> int:
    """Nanoseconds from launch to result. A result exists only when its work is done, on an accelerator too."""
    started = time.perf_counter_ns()
    device.launch(item, started)
    while not device.poll(time.perf_counter_ns()):
        pass
    return time.perf_counter_ns() - started


def times_ns(
    device: Device,
    makers: Sequence[Callable[[], Forward]],
    rounds: int,
    tick: Callable[[], None],
    rng: np.random.Generator,
) -> list[Times]:
    """Measure each kind of item: one uncounted launch of each, then rounds of all kinds in random order.

    A server alternates decodes and chunks. A decode takes up to a fifth longer after a chunk than after a decode,
    likely because the chunk replaced what the CPU's caches held. A random order gives all
    kinds of predecessors to each item.

    Args:
        makers: one function a kind, called before each launch and outside of the measured time.
        tick: called after each kind in each round, the uncounted one included.
        rng: draws the orders.
    """
    repeats = []
    for make in makers:
        first = once_ns(device, make())
        repeats.append(int(np.clip(_ENOUGH_NS // max(first, 1), 1, _MOST_REPEATS)))
        tick()
    times: list[list[int]] = [[] for _ in makers]
    for _ in range(rounds):
        for kind in rng.permutation(len(makers)).tolist():
            times[kind] += [once_ns(device, makers[kind]()) for _ in range(repeats[kind])]
            tick()
    return [np.array(found) for found in times]


def median_and_spread(times: Times) -> tuple[float, float]:
    """The median, and the interquartile range divided by it."""
    low, median, high = np.percentile(times, [25, 50, 75]).tolist()
    return median, (high - low) / median


class InstantDevice:
    """Has every result at once, so that a step's time is the rank's own work."""

    def __init__(self) -> None:
        self._results: list[StepResult] = []

    def launch(self, item: Forward, now_ns: int) -> None:
        """Answer `item` with token 0 for each unit."""
        self._results.append(StepResult(item.units.slot, np.zeros(len(item.units), np.int32)))

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Do nothing, because it holds no KV."""

    def poll(self, now_ns: int) -> list[StepResult]:
        """Return the results of everything launched."""
        results, self._results = self._results, []
        return results

    def ready_at_ns(self) -> int | None:
        """Implement `Device.ready_at_ns`."""
        return None


def host_step_ns(num_sequences: int, block_size: int) -> float:
    """Median time of a rank's own work in a step with `num_sequences` decodes."""
    length = _HOST_STEPS + 20
    settings = SchedulerSettings(
        num_blocks=num_sequences * -(-(length + 16) // block_size) + num_sequences,
        block_size=block_size,
        max_model_len=length + 16,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=16 * num_sequences,
    )
    rank = build_rank(settings, InstantDevice())
    for i in range(num_sequences):
        request = Request(
            request_id=f"r{i}",
            num_prompt_tokens=16,
            sampling=SamplingParams(max_tokens=length),
            arrival_ns=i,
            token_ids=np.full(16, i, np.int32).tobytes(),
        )
        rank.add(request, 0)
    rank.step(0)
    rank.step(0)
    found = []
    for _ in range(_HOST_STEPS):
        started = time.perf_counter_ns()
        rank.step(0)
        found.append(time.perf_counter_ns() - started)
    return float(np.median(found))


def host_times(max_num_seqs: int, block_size: int) -> HostTimes:
    """Fit a line through the rank's own work at one sequence, at half of the maximum, and at the maximum."""
    counts = np.array(sorted({1, max(max_num_seqs // 2, 1), max_num_seqs}), np.float64)
    found = np.array([host_step_ns(int(count), block_size) for count in counts])
    slope, intercept = np.polyfit(counts, found, 1).tolist()
    return HostTimes(step_ns=max(intercept, 0.0), sequence_ns=max(slope, 0.0))
