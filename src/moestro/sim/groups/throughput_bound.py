"""Upper bound on the throughput of any mode: 1 / (time that the busiest device must work for one token).

Whatever a scheduler does, a device that must work for t ns per token completes at most 1e9 / t tokens a second. The
work of a token is fixed by the experts that it visits and by who holds them. Work that several devices can do is spread
so that the busiest device has the least: attention of any request, and an expert with copies. A token is a decode
token; prefill comes on top, so the bound holds for output tokens with any prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.token_keys import request_key
from moestro.cost.drawn_step import ExpertGate
from moestro.cost.model import Batch, StageCostModel

Floats = NDArray[np.float64]

_MAX_PASSES = 1000  # a few passes suffice; the limit only guards against a cycle of rounding errors
_TOLERANCE = 1e-9  # relative change of the busiest device's work at which spreading ends


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTimes:
    """Least time of each stage for one token, at the batch size that is best for it.

    Attributes:
        token_ns: attention and dense parts of all layers, and the sampler.
        expert_ns: one expert over one row; float64[layers, experts] where experts have different batches.
    """

    token_ns: float
    expert_ns: float | Floats


def least_times(cost: StageCostModel, batch: Batch, most_rows: int) -> LeastTimes:
    """Find the least times per token over batch sizes.

    Args:
        cost: prices of the stages.
        batch: largest batch of one attention stage, decodes; its first n units are the smaller batches.
        most_rows: most rows of one call of an expert.
    """
    sizes = _sizes(len(batch.start))
    attention = [
        sum(
            group.num_layers * cost.attention_ns(group.layers[0], Batch(batch.start[:n], batch.num_tokens[:n]))
            for group in cost.network.groups
        )
        / int(batch.num_tokens[:n].sum())
        for n in sizes
    ]
    sampling = [cost.sample_ns(n) / n for n in sizes]
    experts = [cost.expert_ns(n) / n for n in _sizes(most_rows)] if cost.network.experts else [0.0]
    return LeastTimes(token_ns=min(attention) + min(sampling), expert_ns=min(experts))


def _sizes(most: int) -> list[int]:
    """Every size up to 64, then about 3 % more each time, and `most`."""
    sizes = {*range(1, min(most, 64) + 1), most}
    size = 64.0
    while size < most:
        sizes.add(int(size))
        size *= 1.03
    return sorted(sizes)


def drawn_visits(gate: ExpertGate, num_layers: int, num_tokens: int = 1 << 14) -> Floats:
    """Return a token's mean visits to each expert, float64[layers, experts], from a sample of draws.

    A token chooses no expert twice, so it visits a hot expert less often than top-k times its popularity. The standard
    error of the default sample is at most 0.004.
    """
    keys = np.array([request_key(number) for number in range(num_tokens)], np.uint64)
    visits: Floats = gate.count(keys, range(num_layers)) / num_tokens
    return visits


def least_work_ns(
    visits: Floats,
    times: LeastTimes,
    table: ExpertTable,
    attention_workers: Sequence[int],
    slowdown: Floats | None = None,
) -> Floats:
    """Return the least work of each device per token, float64[workers], ns, spread so that the largest is least.

    Args:
        visits: float64[layers, experts], mean visits of a token: `drawn_visits`, or a run's counts over its tokens.
        times: least times of the stages.
        table: slots of each worker.
        attention_workers: workers that compute attention; any of them may serve any request.
        slowdown: float64[workers], factor on the times of each worker. None means 1 for all.
    """
    slowdown = np.ones(len(table.logical_of)) if slowdown is None else slowdown
    copies = (table.num_copies > 0) & table.is_alive[:, None, None]
    num_copies = copies.sum(axis=0)
    work_ns = visits * times.expert_ns
    fixed_ns = (copies * np.where(num_copies == 1, work_ns, 0.0)).sum(axis=(1, 2)) * slowdown
    amounts, holders = [times.token_ns], [np.array(attention_workers)]
    for layer, expert in np.argwhere(num_copies > 1).tolist():
        amounts.append(float(work_ns[layer, expert]))
        holders.append(np.flatnonzero(copies[:, layer, expert]))
    return _spread(fixed_ns, amounts, holders, slowdown)


def throughput_bound(work_ns: Floats) -> float:
    """Return the output tokens per second that no mode exceeds, from each device's least work per token, ns."""
    return 1e9 / float(work_ns.max())


def largest_share(work_ns: Floats) -> float:
    """Return the busiest device's share of all work. No mode exceeds its inverse as speedup over one device."""
    return float(work_ns.max() / work_ns.sum())


def _spread(
    fixed_ns: Floats, amounts: Sequence[float], holders: Sequence[NDArray[np.int64]], slowdown: Floats
) -> Floats:
    """Add divisible amounts to their holders so that the largest total is least.

    Levelling one amount at a time minimises the sum of squares, weighted by speed, and the minimum of that sum also has
    the least maximum (Fujishige 1980: lexicographically optimal base of a polymatroid with weights).
    """
    total_ns = fixed_ns.copy()
    shares = [np.zeros(len(some)) for some in holders]
    previous = -1.0
    for _ in range(_MAX_PASSES):
        for index, (amount, some) in enumerate(zip(amounts, holders, strict=True)):
            others = total_ns[some] - shares[index]
            shares[index] = _level(others, amount, slowdown[some])
            total_ns[some] = others + shares[index]
        squares = float((total_ns**2 / slowdown).sum())
        if abs(squares - previous) <= _TOLERANCE * squares:
            break
        previous = squares
    return total_ns


def _level(heights: Floats, amount: float, slowdown: Floats) -> Floats:
    """Pour `amount` on `heights` as water into vessels, each 1 / slowdown wide: the lowest ones get a common level."""
    order = np.argsort(heights)
    ordered, width = heights[order], 1 / slowdown[order]
    levels = ((ordered * width).cumsum() + amount) / width.cumsum()
    level = levels[int(np.flatnonzero(levels > ordered)[-1])] if amount > 0 else ordered[0]
    filled: Floats = np.maximum(level - heights, 0.0)
    return filled
