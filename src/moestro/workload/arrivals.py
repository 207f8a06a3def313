"""When requests arrive: int64[n] nanoseconds after the start, in order.

Every process is scaled so that the last of n requests arrives at n / rate: the rate offered is the rate asked for, also
in a short run, and two runs at one rate differ by their pattern alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError

Int64s = NDArray[np.int64]

# Requests a stamp, on average, from which on stamps count as quantised rather than as chance coincidences.
_QUANTISED = 2.0


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
    """Weibull gaps of mean 1 / `rate` seconds: what half of ServeGen's clients show (arXiv 2505.09999, section 3).

    Args:
        shape: 1 is Poisson, less comes in bursts, with a longer tail than gamma's, more is steadier.
    """
    return _scaled(np.cumsum(rng.weibull(shape, size=num_requests)), rate)


def replay(timestamp_ns: Int64s, rng: np.random.Generator) -> Int64s:
    """A trace's own times, from 0; a trace with coarse stamps is spread first (see `spread`)."""
    return spread(timestamp_ns - timestamp_ns[0], rng)


def at_rate(offsets_ns: Int64s, rate: float) -> Int64s:
    """The same pattern, stretched or squeezed in time until its mean rate is `rate` requests a second.

    Raises:
        ConfigError: all requests arrive at once, and no stretching gives them a rate.
    """
    if offsets_ns[-1] <= 0:
        raise ConfigError("the trace's requests all carry one timestamp: give --arrivals poisson")
    return _scaled(offsets_ns.astype(np.float64), rate)


def faster(offsets_ns: Int64s, factor: float) -> Int64s:
    """The same pattern, `factor` times as fast."""
    scaled: Int64s = np.rint(offsets_ns / factor).astype(np.int64)
    return scaled


def spread(timestamp_ns: Int64s, rng: np.random.Generator) -> Int64s:
    """Undo coarse stamps: the requests of each stamp arrive uniformly at random in the gap that follows it.

    Mooncake's stamps lie 3 s apart, with ten requests each; replayed as they stand they are bursts that never were. A
    gap longer than the median one is a stamp without requests, so nobody is moved beyond the median gap. Stamps of less
    than two requests on average are exact, and are kept.

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
    moved.sort()  # within a group only: no group reaches the next stamp
    return moved


def _scaled(times: NDArray[np.float64], rate: float) -> Int64s:
    scaled: Int64s = np.rint(times * (len(times) / rate / times[-1] * NS_PER_S)).astype(np.int64)
    return scaled
