"""Draws of arrival times, of lengths, and of prompts as token ids or words.

A prompt follows from its length, its block hashes and a key: the same key gives the same prompt everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS, NS_PER_S
from moestro.core.rng import mix64, uniform
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
        raise ConfigError(
            "all requests of the trace have the same timestamp, which no rate stretches: drop the rate, or give Poisson"
            " arrivals (--arrivals poisson of moestro bench, arrivals = 'poisson' of a scenario)"
        )
    return _scaled(offsets_ns.astype(np.float64), rate)


def faster(offsets_ns: Int64s, factor: float) -> Int64s:
    """Speed up a pattern by `factor`.

    Raises:
        ConfigError: the last request would arrive beyond the end of times.
    """
    last_ns = int(offsets_ns[-1]) / factor
    if last_ns >= FOREVER_NS:
        raise ConfigError(
            f"a factor of {factor:g} on the rate is too low: the last request would arrive after"
            f" {last_ns / NS_PER_S / _S_PER_YEAR:,.3g} years, and times end at"
            f" {FOREVER_NS / NS_PER_S / _S_PER_YEAR:.0f}"
        )
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


Int32s = NDArray[np.int32]

# Prompts: different runs of one seed share no block, so no run warms the next one's cache.

# Frequent words; most tokenizers encode each as one token after a space.
WORDS = (  # noqa: SIM905 as a list it would fill a page
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which"
    " one you were all her she there would their we him been has when who will no more if out so said what up its"
    " about into than them can only other time new some could these two may then do first any my now such like our"
    " over man me even most made after also did many off before must well back through years where much your way"
    " down should because long each just state those people too still good own world very here both life day small"
    " under great last while house never come work part place high right since water set name form line next"
).split()


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Selects a set of prompts. Different runs of one seed share no block, so no run warms the next one's cache.

    Attributes:
        seed: the operator's seed.
        run: 0 for warm-up, then 1, 2, ….
    """

    seed: int
    run: int

    def stream(self, number: int) -> NDArray[np.uint64]:
        """uint64[1], the seed of one independent stream of draws."""
        state = np.array([self.seed % 2**64], np.uint64)
        for part in (self.run, number):
            state = mix64(state + np.array([part + 1], np.uint64))  # an array wraps silently; a scalar would warn
        return state


_BLOCKS, _STREAMS = range(2)


def token_ids(rows: Rows, index: int, vocab_size: int, key: PromptKey) -> Int32s:
    """int32[num_prompt_tokens], the prompt of request `index`, with ids from 0 to `vocab_size` - 1.

    Equal hash ids give equal blocks. A partial last block is the beginning of its block. Prompts of one stream begin
    alike. All other tokens are unique to the request.
    """
    num_tokens = int(rows.num_prompt_tokens[index])
    if rows.hash_ids is not None:
        starts = rows.hash_ids[index] * rows.block_size
        counters = (starts[:, None] + np.arange(rows.block_size)).reshape(-1)[:num_tokens]
        head = _draw(key, _BLOCKS, counters, vocab_size)
        own = (index << 32) + np.arange(len(head), num_tokens)
        return np.concatenate([head, _draw(key, _STREAMS, own, vocab_size)])
    counters = np.arange(num_tokens)
    if rows.streams is None or rows.stream is None:
        return _draw(key, _STREAMS, counters + (index << 32), vocab_size)
    segments = rows.streams.segments(int(rows.stream[index]))
    for i, (owner, start) in enumerate(segments):
        end = segments[i + 1][1] if i + 1 < len(segments) else num_tokens
        counters[start:end] += owner << 32
    return _draw(key, _STREAMS, counters, vocab_size)


def text(rows: Rows, index: int, key: PromptKey) -> str:
    """The prompt of request `index` as text: the file's own text, or one common word for each token."""
    if rows.texts is not None:
        return rows.texts[index]
    return " ".join(WORDS[i] for i in token_ids(rows, index, len(WORDS), key).tolist())


def _draw(key: PromptKey, stream: int, counters: NDArray[np.int64], vocab_size: int) -> Int32s:
    return (uniform(key.stream(stream), counters.astype(np.uint64)) * vocab_size).astype(np.int32)
