"""Measures work items on a real device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moestro.core.work import Device, Forward

_MOST_REPEATS, _ENOUGH_NS = 5, 20_000_000  # for one item in one round; short items repeat more often
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


def mean_and_spread(times: Times) -> tuple[float, float]:
    """Return the mean without the outermost times, and the interquartile range divided by the median.

    Load is a sum of steps. Some of them take much longer than most, so the median is up to 5 % below the mean. The
    longest and the shortest twentieth (at least one of each, of three or more) do not count: a busy neighbour can
    lengthen a step many times.
    """
    cut = min(max(len(times) // 20, 1), (len(times) - 1) // 2)
    low, median, high = np.percentile(times, [25, 50, 75]).tolist()
    return float(np.sort(times)[cut : len(times) - cut].mean()), (high - low) / median
