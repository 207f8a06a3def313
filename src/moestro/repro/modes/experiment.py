"""The map: every system with constant numbers of requests in every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table

from moestro.errors import ConfigError
from moestro.repro.amoe.findings import ClosedRun
from moestro.repro.amoe.loads import Ladder
from moestro.repro.amoe.systems import ABOUT
from moestro.repro.experiment import PartsExperiment, chosen_parts
from moestro.repro.modes.cases import CASES, OURS, QUICK, SYSTEMS, MapCase
from moestro.repro.results import Cell, Claim, Findings
from moestro.repro.settings import ReproSettings

# The findings of the map: runs with constant numbers of requests, and throughput within a bound on ITL.

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


GOAL = 1.5  # times the best of the others
_BATCH_ITL_MS = ITL_BOUNDS_MS[1]


class ModesExperiment(PartsExperiment[ModesFindings, MapCase]):
    """Runs cases."""

    findings_type = ModesFindings
    drawing = "moestro.repro.modes.draw"

    def num_runs(self, load: str) -> int:
        """One for all numbers of requests of a system and a seed."""
        return len(SYSTEMS) * len(self.parts[load].seeds)

    def run(self, load: str, step: Callable[[str], None]) -> ModesFindings:
        """Run one case."""
        case, findings = self.parts[load], ModesFindings()
        for system in SYSTEMS:
            for seed in case.seeds:
                step(f"{load}: {system}, seed {seed}")
                findings.closed += _runs(case, system, seed)
        return findings

    def claims(self, findings: ModesFindings) -> list[Claim]:
        """Our goal: a case in which `async` has 1.5 times the throughput of the best of the others."""
        known = [name for name in findings.cases if len(findings.seeds(name)) >= 5]
        gains = {name: findings.gain(name, _BATCH_ITL_MS) for name in known}
        if not gains:
            return []
        ours = "; ".join(f"{name} {g.mean():.2f} x ({g.min():.2f} to {g.max():.2f})" for name, g in gains.items())
        return [
            Claim(
                source="our goal",
                paper=f"async has {GOAL} x the throughput of the best of the others in a realistic case",
                ours=f"at a mean ITL of {_BATCH_ITL_MS:g} ms, five seeds: {ours}",
                holds=any(bool(gain.min() >= GOAL) for gain in gains.values()),
                why="the smallest gain over the seeds is judged",
            )
        ]

    def tables(self, findings: ModesFindings) -> Iterator[RenderableType]:
        """A table for each bound on ITL, then a line about each system."""
        for itl_ms in ITL_BOUNDS_MS:
            table = Table(
                "case", *SYSTEMS, "async / best other",
                title=f"1,000 output tokens a second at a mean ITL of at most {itl_ms:g} ms",
                caption="simulated; means over seeds, in brackets the least and the most",
            )  # fmt: skip
            for name in findings.cases:
                most = [findings.most(name, system, itl_ms).mean() / 1e3 for system in SYSTEMS]
                gain = findings.gain(name, itl_ms)
                table.add_row(
                    name, *(f"{each:.1f}" if each else "-" for each in most),
                    f"{gain.mean():.2f} ({gain.min():.2f}, {gain.max():.2f})",
                )  # fmt: skip
            yield table
        for system in SYSTEMS:
            yield f"{system}: {ABOUT[system]}"


def make_experiment(settings: ReproSettings) -> ModesExperiment:
    """The experiment under these settings.

    Raises:
        ConfigError: --loads names one that is not in the plan.
    """
    return ModesExperiment(chosen_parts(QUICK if settings.quick else CASES, settings.loads))


def _runs(case: MapCase, system: str, seed: int) -> list[ClosedRun]:
    ladder = Ladder(
        load=case.name, bed=case.bed, lengths=case.lengths, numbers=case.ladder, passes=case.passes,
        num_sensitive=case.num_sensitive, computes_prompts=case.computes_prompts,
    )  # fmt: skip
    form = f"{system}:{case.step_policy}" if case.step_policy and system in OURS else system
    try:
        return [msgspec.structs.replace(run, system=system) for run in ladder.run(form, seed)]
    except ConfigError:  # the network does not fit so divided
        return []
