"""The line that an operator sees every ten seconds while there is traffic."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from moestro.serve.engines import Engines
from moestro.serve.messages import RankLoad
from moestro.serve.metrics import Metrics

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class _Totals:
    """One engine's, at one moment."""

    num_prompt: int
    num_generated: int
    num_queried: int
    num_hit: int


class StatLines:
    """Says what the engines did since it was asked last, and how full they are."""

    def __init__(self, engines: Engines, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._before = self._totals()

    def lines(self, seconds: float) -> list[str]:
        """One line for each engine that has, or had, anything to do in the last `seconds`."""
        before, self._before = self._before, self._totals()
        return [
            _line(engine, load, _since(old, new), seconds)
            for engine, (load, old, new) in enumerate(zip(self._engines.loads, before, self._before, strict=True))
            if load.num_running or load.num_waiting or old != new
        ]

    def _totals(self) -> list[_Totals]:
        return [
            _Totals(m.num_prompt_tokens, m.num_generated_tokens, load.num_queried_tokens, load.num_hit_tokens)
            for m, load in zip(self._metrics.engines, self._engines.loads, strict=True)
        ]


async def log_forever(lines: StatLines) -> None:
    """Log them at every interval."""
    then = time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = time.monotonic()
        for line in lines.lines(now - then):
            logger.info("%s", line)
        then = now


def _since(old: _Totals, new: _Totals) -> _Totals:
    """The difference; a rank that was started again counts its cache anew."""
    is_new_rank = new.num_queried < old.num_queried
    return _Totals(
        new.num_prompt - old.num_prompt,
        new.num_generated - old.num_generated,
        new.num_queried - (0 if is_new_rank else old.num_queried),
        new.num_hit - (0 if is_new_rank else old.num_hit),
    )


def _line(engine: int, load: RankLoad, gained: _Totals, seconds: float) -> str:
    hits = f", prefix hits {gained.num_hit / gained.num_queried:.0%}" if gained.num_queried else ""
    return (
        f"engine {engine}: running {load.num_running}, waiting {load.num_waiting}, KV {load.kv_usage:.1%}{hits},"
        f" tokens/s in {gained.num_prompt / seconds:.1f}, out {gained.num_generated / seconds:.1f}"
    )
