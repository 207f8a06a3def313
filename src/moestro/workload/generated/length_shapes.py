"""Gimbal's five shapes of a length mix: random, central, descending, two-end, average (v1, section V-A4, figure 5).

The paper names the shapes and shows pictures, and defines none of them in words. `draw_shape` takes "modifying
the distributional shape of the BurstGPT traces" and "we sample 1,000 requests according to each distribution"
literally: a shape is the frequency of each prompt length. Another reading, a shape as the order in which requests of
one length mix arrive, is not implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.errors import ConfigError
from moestro.workload.rows import Int64s, Rows

Shape = Literal["random", "central", "descending", "two-end", "average"]
SHAPES: tuple[Shape, ...] = ("random", "central", "descending", "two-end", "average")
LONGEST = 3000  # tokens; covers 97.6 % of BurstGPT's requests (Gimbal v1, section V-A2, the load threshold)

_Floats = NDArray[np.float64]
# Inverse distribution functions: the length, as a fraction of the longest prompt, below which a share u lies.
_QUANTILES: dict[str, Callable[[_Floats], _Floats]] = {
    "average": lambda u: u,  # flat
    "descending": lambda u: 1 - np.sqrt(1 - u),  # density falls linearly to 0
    "central": lambda u: np.where(
        u < 0.5, np.sqrt(u / 2), 1 - np.sqrt((1 - u) / 2)
    ),  # a triangle with its peak in the middle
    "two-end": lambda u: 0.5 + np.sign(u - 0.5) * np.sqrt(np.abs(u - 0.5) / 2),  # the triangle upside down
}


def draw_shape(rows: Rows, shape: Shape, num_requests: int, rng: np.random.Generator, longest: int = LONGEST) -> Rows:
    """Draw requests from `rows` so that their prompt lengths have the shape, in random order.

    "random" draws every request with equal chance, without replacement while requests last. The other shapes draw a
    length and take a request with the nearest prompt length; where long prompts are rare, the same ones repeat.
    Answers stay with their prompts.

    Args:
        rows: requests with lengths; shared blocks and times are dropped.
        longest: prompt tokens at which a shape ends; "random" ignores it.

    Raises:
        ConfigError: the shape is unknown, or the prompts are texts, whose lengths are not known.
    """
    _check(shape)
    if rows.texts is not None:
        raise ConfigError("prompts as text have no known lengths, so no shape can be drawn from them")
    order = np.argsort(rows.num_prompt_tokens, kind="stable")
    if shape == "random":
        return _lengths(rows, rng.choice(len(rows), num_requests, replace=num_requests > len(rows)))
    wanted = _QUANTILES[shape](rng.random(num_requests)) * longest
    return _lengths(rows, order[_nearest(rows.num_prompt_tokens[order], wanted, rng)])


def _nearest(lengths: Int64s, wanted: _Floats, rng: np.random.Generator) -> Int64s:
    """For each wanted length, the position of one request, drawn among those in `lengths` (ascending) nearest to it."""
    right = np.searchsorted(lengths, wanted).clip(max=len(lengths) - 1)
    left = (right - 1).clip(min=0)
    nearest = np.where(wanted - lengths[left] < lengths[right] - wanted, lengths[left], lengths[right])
    first, end = np.searchsorted(lengths, nearest, "left"), np.searchsorted(lengths, nearest, "right")
    place: Int64s = first + np.floor(rng.random(len(wanted)) * (end - first)).astype(np.int64)
    return place


def _lengths(rows: Rows, which: Int64s) -> Rows:
    """Make rows of the chosen lengths. They count as generated, because these requests were never recorded."""
    return Rows(rows.num_prompt_tokens[which], rows.num_output_tokens[which], is_generated=True)


def _check(shape: str) -> None:
    if shape not in SHAPES:
        raise ConfigError(f"length shape {shape!r} is unknown: give one of {', '.join(SHAPES)}")
