"""Draws of arrival times and of lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS, NS_PER_S
from moestro.errors import ConfigError
from moestro.workload.rows import Int64s, Rows

# Arrival processes: int64[n] nanoseconds after the start, in order.
#
# Every process is scaled so that the last of n requests arrives at n / rate. The offered rate then equals the given
# rate in a short run too, and two runs at one rate differ only by their pattern. A rate whose last arrival is beyond
# `core.clock.FOREVER_NS` is a ConfigError.

# Mean requests per timestamp from which timestamps count as quantised rather than as coincidences.
_QUANTISED = 2.0
_S_PER_YEAR = 365 * 24 * 3600


def constant(num_requests: int, rate: float) -> Int64s:
    """Equal gaps of 1 / `rate` seconds."""
    return _scaled(np.arange(1, num_requests + 1, dtype=np.float64), rate)


def poisson(num_requests: int, rate: float, rng: np.random.Generator) -> Int64s:
    """Independent arrivals: exponential gaps of mean 1 / `rate` seconds."""
    return gamma(num_requests, rate, 1.0, rng)


def gamma(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> Int64s:
    """Gamma gaps of mean 1 / `rate` seconds.

    Args:
        burstiness: the gamma distribution's shape, with vLLM's name and meaning: 1 is Poisson, less comes in bursts,
            more is steadier. The coefficient of variation of the gaps is burstiness ** -0.5.
    """
    return _scaled(np.cumsum(rng.gamma(burstiness, size=num_requests)), rate)


def weibull(num_requests: int, rate: float, shape: float, rng: np.random.Generator) -> Int64s:
    """Weibull gaps of mean 1 / `rate` seconds, the pattern of half of ServeGen's clients (arXiv 2505.09999, section 3).

    Args:
        shape: 1 is Poisson; a lower shape comes in bursts, with a longer tail than gamma's; a higher one is steadier.
    """
    return _scaled(np.cumsum(rng.weibull(shape, size=num_requests)), rate)


def replay(timestamp_ns: Int64s, rng: np.random.Generator) -> Int64s:
    """Arrival times of a trace, from 0. Coarse timestamps are spread first (see `spread`)."""
    return spread(timestamp_ns - timestamp_ns[0], rng)


def at_rate(offsets_ns: Int64s, rate: float) -> Int64s:
    """Stretch or squeeze a pattern in time until its mean rate is `rate` requests a second.

    Raises:
        ConfigError: all requests arrive at once, so that no stretching gives them a rate.
    """
    if offsets_ns[-1] <= 0:
        raise ConfigError("all requests of the trace have the same timestamp: give --arrivals poisson")
    return _scaled(offsets_ns.astype(np.float64), rate)


def faster(offsets_ns: Int64s, factor: float) -> Int64s:
    """Speed up a pattern by `factor`."""
    scaled: Int64s = np.rint(offsets_ns / factor).astype(np.int64)
    return scaled


def spread(timestamp_ns: Int64s, rng: np.random.Generator) -> Int64s:
    """Spread coarse timestamps: the requests of each timestamp arrive uniformly at random in the gap that follows it.

    Mooncake's timestamps are 3 s apart and carry ten requests each. Replayed literally, they are bursts that never
    happened. A gap longer than the median means a timestamp without requests, so no request moves by more than the
    median gap. Timestamps with fewer than two requests on average are exact and stay as they are.

    Args:
        timestamp_ns: int64[n], not decreasing.
    """
    stamps, group = np.unique(timestamp_ns, return_inverse=True)
    if len(stamps) < 2 or len(timestamp_ns) < _QUANTISED * len(stamps):
        return timestamp_ns
    gaps = np.diff(stamps)
    usual = int(np.median(gaps))
    room = np.append(np.minimum(gaps, usual), usual)[group]
    moved: Int64s = timestamp_ns + np.floor(rng.random(len(timestamp_ns)) * room).astype(np.int64)
    moved.sort()  # changes the order within one timestamp only: no request reaches the next timestamp
    return moved


def _scaled(times: NDArray[np.float64], rate: float) -> Int64s:
    if len(times) / rate * NS_PER_S >= FOREVER_NS:
        raise ConfigError(
            f"a rate of {rate:g} requests/s is too low: the last of {len(times):,} requests would arrive after"
            f" {len(times) / rate / _S_PER_YEAR:,.0f} years, and times end at {FOREVER_NS / NS_PER_S / _S_PER_YEAR:.0f}"
        )
    scaled: Int64s = np.rint(times * (len(times) / rate / times[-1] * NS_PER_S)).astype(np.int64)
    return scaled


# Gimbal's five shapes of a length mix: random, central, descending, two-end, average (v1, section V-A4, figure 5).
#
# The paper names the shapes and shows pictures, and defines none of them in words. `draw_shape` takes "modifying
# the distributional shape of the BurstGPT traces" and "we sample 1,000 requests according to each distribution"
# literally: a shape is the frequency of each prompt length. Another reading, a shape as the order in which requests of
# one length mix arrive, is not implemented.

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
