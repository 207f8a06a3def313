"""Confidence intervals of figures: over seeds, and over blocks of one series of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import msgspec

from moestro.core.student_t import student_t_quantile

_CONFIDENCE = 0.975  # both tails: 95 % intervals

Figures = Mapping[str, float | None]


class FigureInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over seeds. A half width is that of the 95 % interval, by Student's t; None with a single value.

    Attributes:
        mean, half_width: of the figure.
        ratio, ratio_half_width: of its ratio to the first policy's in the run with the same seed. None means that the
            first policy has no such figure, or 0.
        num_seeds: runs that have the figure.
    """

    mean: float
    half_width: float | None
    ratio: float | None
    ratio_half_width: float | None
    num_seeds: int


def intervals(runs: Sequence[Figures], base: Sequence[Figures]) -> dict[str, FigureInterval]:
    """Compute the intervals of all figures of one policy.

    Args:
        runs: figures of the policy, one run each seed.
        base: those of the first policy, with the same seeds.
    """
    found = {}
    for name in runs[0]:
        values = [value for run in runs if (value := run[name]) is not None]
        if not values:
            continue
        pairs = [(run[name], other.get(name)) for run, other in zip(runs, base, strict=True)]
        ratios = [value / of for value, of in pairs if value is not None and of]
        found[name] = FigureInterval(
            mean=fmean(values),
            half_width=_half_width(values),
            ratio=fmean(ratios) if ratios else None,
            ratio_half_width=_half_width(ratios),
            num_seeds=len(values),
        )
    return found


def block_half_width(without: Sequence[float]) -> float:
    """Return the half width of the 95 % interval of a figure of a series, by the jackknife over blocks.

    Blocks of consecutive requests keep what neighbours have in common, which single requests would not.

    Args:
        without: the figure without each of the blocks; at least 2.
    """
    num, mean = len(without), fmean(without)
    variance = (num - 1) / num * sum((each - mean) ** 2 for each in without)
    return float(student_t_quantile(_CONFIDENCE, num - 1) * variance**0.5)


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return float(student_t_quantile(_CONFIDENCE, len(values) - 1) * stdev(values) / len(values) ** 0.5)
