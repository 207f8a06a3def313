"""Loads of a testbed: generated sessions, and Mooncake's traces where they are available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moestro.repro.testbed import TimedLoad
from moestro.workload.generated.draws import at_rate, replay
from moestro.workload.generated.sessions import PUBLISHED_SHAPES, SHAPES, steady_rows
from moestro.workload.rows import Rows
from moestro.workload.traces.reading import read_trace

MOONCAKE_BLOCK = 512  # tokens of a block of Mooncake's traces, which name no smaller ones
SESSION_BLOCK = 16  # vLLM's
TUNING_SEED, SCORED_SEED = 0, 101  # parameters are tuned on the requests of one, and everything is scored on the other
_TUNED_ON = 0.25  # first part of a trace that is tuned on; the rest is scored
_NATURAL_RATE = 8.0  # requests a second at which sessions are drawn; a load then scales their times, as the paper does


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a load.

    Attributes:
        name: the load's name in tables and on the command line.
        block_size: tokens of the smallest block that its prompts name.
        is_generated: whether it is made of generated sessions rather than of a trace.
        rows_of: returns the requests of a seed with their times. Another seed gives other sessions. Of a trace,
            TUNING_SEED gives the beginning and any other seed the rest.
    """

    name: str
    block_size: int
    is_generated: bool
    rows_of: Callable[[int], Rows]

    def load(self, rate: float, seed: int) -> TimedLoad:
        """The requests of a seed, in time scaled to `rate` requests a second."""
        rows = self.rows_of(seed)
        assert rows.timestamp_ns is not None, "sources have times"
        offsets_ns = replay(rows.timestamp_ns, np.random.default_rng([seed, 1]))
        return TimedLoad(self.name, rows, at_rate(offsets_ns, rate), self.is_generated)


def generated_sources(num_requests: int) -> list[Source]:
    """Sessions like LMetric's chat, API, coder and tool-agent traces; half as many requests for TUNING_SEED."""
    return [
        Source(
            name=name,
            block_size=SESSION_BLOCK,
            is_generated=True,
            rows_of=partial(_steady, name, num_requests),
        )
        for name in PUBLISHED_SHAPES
    ]


def trace_sources(directory: Path, num_requests: int) -> list[Source]:
    """Return Mooncake's traces in `directory`: for TUNING_SEED their first quarter, for others up to `num_requests`."""
    sources = []
    for name in ("mooncake_conversation", "mooncake_synthetic"):
        for path in (directory / f"{name}.jsonl", directory / f"{name}.jsonl.zst"):
            if path.exists():
                window = partial(_window, read_trace(path), num_requests)
                sources.append(Source(name=name, block_size=MOONCAKE_BLOCK, is_generated=False, rows_of=window))
                break
    return sources


def _steady(name: str, num_requests: int, seed: int) -> Rows:
    # The middle of a window three times as long, because late turns are missing at the end of a short window.
    wanted = num_requests // 2 if seed == TUNING_SEED else num_requests
    middle = np.arange(wanted, 2 * wanted)
    return steady_rows(SHAPES[name], 3 * wanted, _NATURAL_RATE, seed).select(middle)


def _window(rows: Rows, num_requests: int, seed: int) -> Rows:
    first = int(_TUNED_ON * len(rows))
    window = np.arange(first) if seed == TUNING_SEED else np.arange(first, len(rows))
    return rows.select(window[:num_requests])
