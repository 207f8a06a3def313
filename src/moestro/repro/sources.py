"""Loads of a testbed: generated sessions, and Mooncake's traces where they are available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moestro.repro.testbed import TimedLoad
from moestro.workload.arrivals import at_rate, replay
from moestro.workload.rows import Rows
from moestro.workload.session_generator import steady_rows
from moestro.workload.session_shapes import PUBLISHED_SHAPES, SHAPES
from moestro.workload.traces import read_trace

MOONCAKE_BLOCK = 512  # tokens of a block of Mooncake's traces, which name no smaller ones
SESSION_BLOCK = 16  # vLLM's
_NUM_UNSEEN = 5  # windows of a trace besides that of seed 0
_NATURAL_RATE = 8.0  # requests a second at which sessions are drawn; a load then scales their times, as the paper does


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a load.

    Attributes:
        name: the load's name in tables and on the command line.
        block_size: tokens of the smallest block that its prompts name.
        is_generated: whether it is made of generated sessions rather than of a trace.
        rows_of: returns the requests of a seed with their times. Another seed gives other sessions, or another window
            of a trace.
        num_unseen: number of seeds besides 0 whose requests have none in common.
    """

    name: str
    block_size: int
    is_generated: bool
    rows_of: Callable[[int], Rows]
    num_unseen: int

    def load(self, rate: float, seed: int) -> TimedLoad:
        """The requests of a seed, in time scaled to `rate` requests a second."""
        rows = self.rows_of(seed)
        assert rows.timestamp_ns is not None, "sources have times"
        offsets_ns = replay(rows.timestamp_ns, np.random.default_rng([seed, 1]))
        return TimedLoad(self.name, rows, at_rate(offsets_ns, rate), self.is_generated)


def generated_sources(num_requests: int) -> list[Source]:
    """Sessions like LMetric's chat, API, coder and tool-agent traces."""
    return [
        Source(
            name=name,
            block_size=SESSION_BLOCK,
            is_generated=True,
            rows_of=partial(_steady, name, num_requests),
            num_unseen=1 << 30,
        )
        for name in PUBLISHED_SHAPES
    ]


def trace_sources(directory: Path, num_requests: int) -> list[Source]:
    """Return Mooncake's traces in `directory`, in windows of `num_requests` or, if less, a sixth of the trace."""
    sources = []
    for name in ("mooncake_conversation", "mooncake_synthetic"):
        for path in (directory / f"{name}.jsonl", directory / f"{name}.jsonl.zst"):
            if path.exists():
                rows = read_trace(path)
                window = partial(_window, rows, min(num_requests, len(rows) // (1 + _NUM_UNSEEN)))
                sources.append(
                    Source(
                        name=name, block_size=MOONCAKE_BLOCK, is_generated=False, rows_of=window,
                        num_unseen=_NUM_UNSEEN,
                    )
                )  # fmt: skip
                break
    return sources


def _steady(name: str, num_requests: int, seed: int) -> Rows:
    # The middle of a window three times as long, because late turns are missing at the end of a short window.
    middle = np.arange(num_requests, 2 * num_requests)
    return steady_rows(SHAPES[name], 3 * num_requests, _NATURAL_RATE, seed).select(middle)


def _window(rows: Rows, num_requests: int, seed: int) -> Rows:
    """Return the first window for seed 0, and the following windows, which do not overlap, for other seeds."""
    first = num_requests * (0 if seed == 0 else 1 + (seed - 1) % _NUM_UNSEEN)
    return rows.select(np.arange(first, first + num_requests))
