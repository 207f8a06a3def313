"""Service level objectives: the bounds that a good request meets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.timeline import Timelines
from moestro.errors import ConfigError

NS_PER_MS = 1_000_000
_FIELDS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}  # vLLM spells it e2el


@dataclass(frozen=True, slots=True, kw_only=True)
class Slos:
    """Upper bounds in milliseconds, all of which a request must meet. None means no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, timelines: Timelines) -> NDArray[np.bool_]:
        """bool[n]. An answer of one token has no gap and so meets any bound on gaps."""
        good = np.ones(len(timelines), np.bool_)
        for bound_ms, value_ns in (
            (self.ttft_ms, timelines.ttft_ns),
            (self.tpot_ms, timelines.tpot_ns),
            (self.e2e_ms, timelines.e2e_ns),
        ):
            if bound_ms is not None:
                good &= ~(value_ns > bound_ms * NS_PER_MS)
        return good


def parse_slos(pairs: Sequence[str]) -> Slos | None:
    """Parse `("ttft:500", "tpot:50")`; no pairs give None.

    Raises:
        ConfigError: a pair is not NAME:MILLISECONDS.
    """
    bounds: dict[str, float] = {}
    for pair in pairs:
        name, _, number = pair.partition(":")
        if name not in _FIELDS or not _is_positive(number):
            raise ConfigError(
                f"--goodput {pair!r} is not an objective: give ttft:MS, tpot:MS or e2e:MS, milliseconds above 0,"
                " for instance --goodput ttft:500 tpot:50"
            )
        bounds[_FIELDS[name]] = float(number)
    return Slos(**bounds) if bounds else None


def _is_positive(number: str) -> bool:
    try:
        return 0 < float(number) < math.inf
    except ValueError:
        return False
