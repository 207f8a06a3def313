"""Reads durations of steps from the times of a probe's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.calibrate.probing.probes import ProbeAnswer, RequestTimes

_CUT = 0.1  # of the gaps, at either end: a busy neighbour can lengthen a step many times
_BUNCHED = 0.1  # of the mean gap: two tokens that are nearer than this were delivered together
LEAST_GAPS = 6  # of one sequence, for a mean
# A chunk's step is clearly longer than decode steps by this share of theirs, and by so many times their range.
_CLEAR, _CLEAR_RANGES = 0.1, 2.0
_SAME_STEP = 0.5  # of a decode step: two tokens within this time come from one step


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Mean duration of a step of decodes.

    Attributes:
        rows: sequences.
        context: tokens of all their contexts together, each with its own new token.
        ns: duration.
    """

    rows: float
    context: float
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTime:
    """Time to the first token of a prompt alone on the server.

    Attributes:
        new, cached: tokens of the prompt that are computed, and those found in the prefix cache.
        ns: time from its sending.
    """

    new: int
    cached: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTime:
    """Duration of a step that computes a whole prompt beside one decode.

    Attributes:
        context: tokens of the decode's context.
        new: tokens of the prompt.
        ns: duration.
    """

    context: float
    new: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideTime:
    """Time to the first token of a prompt that arrives while other sequences decode.

    Attributes:
        rows, context: the other sequences, and the tokens of their contexts together.
        new: tokens of the prompt.
        ns: time from its sending.
    """

    rows: float
    context: float
    new: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCount:
    """Steps over which a prompt was spread while another sequence decoded.

    Attributes:
        num_steps: their number; None: they do not differ from decode steps.
        first_ns: duration of the first, which computes a full chunk.
        context: tokens of the decode's context.
    """

    num_steps: int | None
    first_ns: float = 0.0
    context: float = 0.0


def mean_gap(gaps: NDArray[np.float64]) -> float:
    """Return the mean without the longest and the shortest tenth. The median of skewed times is below what adds up.

    Where tokens arrive in bunches, as on a busy network, short gaps and long ones belong together, and all count.
    """
    mean = float(gaps.mean())
    if (gaps < _BUNCHED * mean).mean() > _CUT:
        return mean
    cut = int(len(gaps) * _CUT)
    return float(np.sort(gaps)[cut : len(gaps) - cut].mean())


def num_together(answer: ProbeAnswer) -> int:
    """Count the requests that had a token before the first of them ended."""
    answered = [each for each in answer.requests if each.failure is None]
    first_end = min((each.deliveries[-1] for each in answered), default=0)
    return sum(bool(each.deliveries[0] < first_end) for each in answered)


def decode_time(answer: ProbeAnswer) -> DecodeTime | None:
    """Return the mean step while all sequences of a probe decode; None: they hardly did so together."""
    answered = [each for each in answer.requests if each.failure is None]
    begin = max(each.deliveries[0] for each in answered)
    end = min(each.deliveries[-1] for each in answered)
    gaps, context = [], 0.0
    for each in answered:
        inside = np.flatnonzero((each.deliveries >= begin) & (each.deliveries <= end))
        if len(inside) <= LEAST_GAPS:
            return None
        per_event = _tokens_per_event(each)
        gaps.append(np.diff(each.deliveries[inside]) / per_event)
        context += each.num_prompt_tokens + float(inside[1:].mean()) * per_event
    return DecodeTime(rows=len(answered), context=context, ns=mean_gap(np.concatenate(gaps)))


def _tokens_per_event(times: RequestTimes) -> float:
    return (times.num_output_tokens - 1) / max(len(times.deliveries) - 1, 1)


def chunk_count(answer: ProbeAnswer) -> ChunkCount:
    """Count the steps of the second request's prompt by the tokens that the first request got meanwhile.

    The step that ends the prompt brings a token to both. Its first chunk is a full one, so its step is the longest.
    """
    decoding, prompt = answer.requests[0], answer.requests[1]
    times, first = decoding.deliveries, int(prompt.deliveries[0])
    gaps = np.diff(times)
    quiet = gaps[times[1:] < prompt.sent_ns][1:]
    last = int(np.abs(times - first).argmin())
    busy = np.flatnonzero((times[1:] > prompt.sent_ns) & (np.arange(1, len(times)) <= last))
    if len(quiet) < 3 or not len(busy):
        return ChunkCount(num_steps=None)
    usual, longest = float(np.median(quiet)), float(gaps[busy].max())
    least = usual + max(_CLEAR * usual, _CLEAR_RANGES * float(np.ptp(quiet)))
    if longest < least or abs(int(times[last]) - first) > _SAME_STEP * usual:
        return ChunkCount(num_steps=None)
    start = int(busy[np.flatnonzero(gaps[busy] > usual + (longest - usual) / 2)[0]])
    return ChunkCount(
        num_steps=last - start, first_ns=float(gaps[start]), context=decoding.num_prompt_tokens + start + 1
    )
