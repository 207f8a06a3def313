"""The map: every system with constant numbers of requests in every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from rich.console import RenderableType
from rich.table import Table

from moestro.errors import ConfigError
from moestro.repro.amoe.closed_runs import Ladder
from moestro.repro.amoe.findings import ClosedRun
from moestro.repro.amoe.systems import ABOUT
from moestro.repro.experiment import PartsExperiment, chosen_parts
from moestro.repro.modes.cases import CASES, OURS, QUICK, SYSTEMS, MapCase
from moestro.repro.modes.findings import ITL_BOUNDS_MS, ModesFindings
from moestro.repro.results import Claim
from moestro.repro.settings import ReproSettings

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
