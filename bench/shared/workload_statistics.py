"""Figures that characterise a workload, to recognise a trace and to judge a generator."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.workload.rows import Int64s, Rows, UInt64s, block_numbers, check_block_size

_PEAK_S = 10


class Lengths(msgspec.Struct, frozen=True):
    """Percentiles of tokens or seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Reuse(msgspec.Struct, frozen=True):
    """Hits of an unlimited prefix cache.

    Attributes:
        block_size: tokens of a block.
        hit_share: share of prompt tokens in full blocks that an earlier prompt contained.
        own_session_share: share of these hits whose block was last used by the same session; None if sessions are
            unknown.
        reused_share: share of distinct blocks that more than one prompt contained.
        again_s: seconds between two uses of a block; None if times are unknown.
    """

    block_size: int
    hit_share: float
    own_session_share: float | None
    reused_share: float
    again_s: Lengths | None


class Turns(msgspec.Struct, frozen=True):
    """Sessions of requests.

    Attributes:
        num_sessions: number of sessions.
        single_share: share of sessions with one request.
        follow_up_share: share of requests that are not their session's first.
        gap_s: seconds between consecutive requests of a session; None if times are unknown or no session has two.
    """

    num_sessions: int
    single_share: float
    follow_up_share: float
    gap_s: Lengths | None


class Statistics(msgspec.Struct, frozen=True):
    """Figures of one workload.

    Attributes:
        rate: requests a second from the first to the last; None if times are unknown.
        gap_cv: coefficient of variation of the gaps between requests.
        peak_over_mean: requests in the busiest 10 s, divided by the mean over 10 s.
    """

    num_requests: int
    is_generated: bool
    prompt_tokens: Lengths
    output_tokens: Lengths
    rate: float | None
    gap_cv: float | None
    peak_over_mean: float | None
    reuse: Reuse | None
    turns: Turns | None


def measure(rows: Rows, block_size: int = 16) -> Statistics:
    """Compute the figures of `rows`, which are in order of time where they have times.

    Args:
        block_size: tokens of a block of the unlimited cache; matters only where prompts share blocks.
    """
    rate, gap_cv, peak = _times(rows.timestamp_ns)
    shares = rows.hash_ids is not None or rows.stream is not None
    return Statistics(
        num_requests=len(rows),
        is_generated=rows.is_generated,
        prompt_tokens=_lengths(rows.num_prompt_tokens),
        output_tokens=_lengths(rows.num_output_tokens),
        rate=rate,
        gap_cv=gap_cv,
        peak_over_mean=peak,
        reuse=_reuse(rows, block_size) if shares else None,
        turns=None if rows.session is None else _turns(rows.session, rows.timestamp_ns),
    )


@dataclass(frozen=True, slots=True)
class _Uses:
    """Every repeated use of a block by a prompt: the request, and the previous request that used the block.

    `reused_share` as in `Reuse`.
    """

    request: Int64s
    before: Int64s
    reused_share: float


def _reuse(rows: Rows, block_size: int) -> Reuse:
    uses = _uses(rows, block_size)
    times = rows.timestamp_ns
    own = None if rows.session is None else rows.session[uses.request] == rows.session[uses.before]
    again = None if times is None or not len(uses.request) else times[uses.request] - times[uses.before]
    return Reuse(
        block_size=block_size,
        hit_share=len(uses.request) * block_size / int(rows.num_prompt_tokens.sum()),
        own_session_share=None if own is None or not len(own) else float(own.mean()),
        reused_share=uses.reused_share,
        again_s=None if again is None else _lengths(again / NS_PER_S),
    )


def _uses(rows: Rows, block_size: int) -> _Uses:
    check_block_size(rows, block_size)
    blocks = [block_numbers(rows, i, int(n), block_size) for i, n in enumerate(rows.num_prompt_tokens)]
    flat: UInt64s = np.concatenate(blocks)
    request = np.repeat(np.arange(len(rows)), [len(each) for each in blocks])
    order = np.argsort(flat, kind="stable")  # groups the uses of each block, in order of requests
    is_again = np.append(False, flat[order][1:] == flat[order][:-1])
    again = np.flatnonzero(is_again)
    num_blocks = len(flat) - len(again)
    num_reused = int((is_again[1:] & ~is_again[:-1]).sum())
    return _Uses(request[order[again]], request[order[again - 1]], num_reused / max(1, num_blocks))


def _turns(session: Int64s, timestamp_ns: Int64s | None) -> Turns:
    counts = np.unique(session, return_counts=True)[1]
    gap_s = None
    if timestamp_ns is not None and len(counts) < len(session):
        order = np.argsort(session, kind="stable")
        same = session[order][1:] == session[order][:-1]
        gap_s = _lengths(np.diff(timestamp_ns[order])[same] / NS_PER_S)
    return Turns(len(counts), float((counts == 1).mean()), 1 - len(counts) / len(session), gap_s)


def _times(timestamp_ns: Int64s | None) -> tuple[float | None, float | None, float | None]:
    if timestamp_ns is None or timestamp_ns[-1] == timestamp_ns[0]:
        return None, None, None
    gaps = np.diff(timestamp_ns)
    counts = np.bincount((timestamp_ns - timestamp_ns[0]) // (_PEAK_S * NS_PER_S))
    rate = (len(timestamp_ns) - 1) / int(timestamp_ns[-1] - timestamp_ns[0]) * NS_PER_S
    return rate, float(gaps.std() / gaps.mean()), float(counts.max() / counts.mean())


def _lengths(values: NDArray[np.int64] | NDArray[np.float64]) -> Lengths:
    return Lengths(float(values.mean()), *(float(each) for each in np.percentile(values, [50, 90, 99])))
