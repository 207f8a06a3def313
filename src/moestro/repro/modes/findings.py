"""The findings of the map: runs with constant numbers of requests, and throughput within a bound on ITL."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.repro.amoe.findings import ClosedRun
from moestro.repro.modes.cases import OURS, SYSTEMS
from moestro.repro.results import Cell, Findings

ITL_BOUNDS_MS = (100.0, 250.0, 1000.0)  # a chat, a long answer in the background, batches without users


class ModesFindings(Findings[Cell], kw_only=True):
    """All runs; `closed` are those with a constant number of requests."""

    closed: list[ClosedRun] = msgspec.field(default_factory=list)

    @property
    def cases(self) -> list[str]:
        """Names of the cases that were run."""
        return list(dict.fromkeys(run.load for run in self.closed))

    def seeds(self, case: str) -> list[int]:
        """Seeds of a case, ascending."""
        return sorted({run.seed for run in self.closed if run.load == case})

    def most(self, case: str, system: str, itl_ms: float) -> NDArray[np.float64]:
        """The throughput of a system within a bound on its mean ITL, float64[seeds], tokens a second; 0 if none."""
        return np.array([self._most(case, system, seed, itl_ms) for seed in self.seeds(case)])

    def _most(self, case: str, system: str, seed: int, itl_ms: float) -> float:
        """Read between runs of neighbouring numbers of requests."""
        runs = sorted(
            (run for run in self.closed if (run.load, run.system, run.seed) == (case, system, seed)),
            key=lambda run: run.num_requests,
        )
        within = [run.tokens_per_s for run in runs if run.itl_ms <= itl_ms]
        for low, high in pairwise(runs):
            if low.itl_ms <= itl_ms < high.itl_ms:
                share = (itl_ms - low.itl_ms) / (high.itl_ms - low.itl_ms)
                within.append(low.tokens_per_s + share * (high.tokens_per_s - low.tokens_per_s))
        return max(within, default=0.0)

    def gain(self, case: str, itl_ms: float) -> NDArray[np.float64]:
        """The best of `async` as a multiple of the best of the others, float64[seeds]; inf if no other keeps the bound.

        NaN means that no system keeps the bound.
        """
        ours = np.max([self.most(case, system, itl_ms) for system in OURS], axis=0)
        others = np.max([self.most(case, name, itl_ms) for name in SYSTEMS if name not in OURS], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            gains: NDArray[np.float64] = ours / others
        return gains

    def best(self, case: str, itl_ms: float) -> str:
        """The system with the most throughput within a bound, in the mean over seeds; "none" if no system keeps it."""
        means = {system: float(self.most(case, system, itl_ms).mean()) for system in SYSTEMS}
        winner = max(means, key=lambda name: means[name])
        return winner if means[winner] else "none"
