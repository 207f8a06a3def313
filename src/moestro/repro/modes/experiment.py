"""The map: every system with constant numbers of requests in every scenario."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from moestro.errors import ConfigError
from moestro.repro.amoe.findings import ClosedRun
from moestro.repro.amoe.loads import closed_load
from moestro.repro.amoe.serving import closed_throughput
from moestro.repro.amoe.systems import ABOUT, build
from moestro.repro.experiment import Experiment
from moestro.repro.modes.findings import ITL_BOUNDS_MS, ModesFindings
from moestro.repro.modes.scenarios import QUICK, SCENARIOS, SYSTEMS, MapCase
from moestro.repro.results import Claim
from moestro.repro.settings import ReproSettings

GOAL = 1.5  # times the best of the others
_BATCH_ITL_MS = ITL_BOUNDS_MS[1]


class ModesExperiment(Experiment[ModesFindings]):
    """Runs scenarios.

    Args:
        scenarios: what is run.

    Attributes:
        scenarios: scenarios by name.
    """

    findings_type = ModesFindings
    drawing = "moestro.repro.modes.draw"

    def __init__(self, scenarios: Sequence[MapCase]) -> None:
        self.scenarios = {scenario.name: scenario for scenario in scenarios}

    @property
    def loads(self) -> list[str]:
        """The names of the scenarios."""
        return list(self.scenarios)

    def plan_of(self, load: str) -> object:
        """The scenario."""
        return self.scenarios[load]

    def num_runs(self, load: str) -> int:
        """One for all numbers of requests of a system and a seed."""
        return len(SYSTEMS) * len(self.scenarios[load].seeds)

    def run(self, load: str, step: Callable[[str], None]) -> ModesFindings:
        """Run one scenario."""
        scenario, findings = self.scenarios[load], ModesFindings()
        for system in SYSTEMS:
            for seed in scenario.seeds:
                step(f"{load}: {system}, seed {seed}")
                findings.closed += _runs(scenario, system, seed)
        return findings

    def claims(self, findings: ModesFindings) -> list[Claim]:
        """Our goal: a scenario in which `async` has 1.5 times the throughput of the best of the others."""
        known = [name for name in findings.scenarios if len(findings.seeds(name)) >= 5]
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
                "scenario", *SYSTEMS, "async / best other",
                title=f"1,000 output tokens a second at a mean ITL of at most {itl_ms:g} ms",
                caption="simulated; means over seeds, in brackets the least and the most",
            )  # fmt: skip
            for name in findings.scenarios:
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
    scenarios: Sequence[MapCase] = QUICK if settings.quick else SCENARIOS
    if settings.loads is not None:
        known = {scenario.name: scenario for scenario in scenarios}
        unknown = [name for name in settings.loads if name not in known]
        if unknown:
            raise ConfigError(f"no load {', '.join(unknown)}; known: {', '.join(known)}")
        scenarios = tuple(known[name] for name in settings.loads)
    return ModesExperiment(scenarios)


def _runs(scenario: MapCase, system: str, seed: int) -> list[ClosedRun]:
    """Measure a system with each number of requests that fits, and with the most that fit."""
    lengths, ladder = scenario.lengths, scenario.ladder
    try:
        most = build(system, scenario.bed, (lengths.mean_context, lengths.longest), seed).most_requests
    except ConfigError:  # the network does not fit so divided
        return []
    numbers = sorted({*(number for number in ladder if number < most), min(most, ladder[-1])})
    runs = []
    for number in numbers:
        num_more = round(2 * number * sum(scenario.passes) / lengths.mean_output) + number // 4 + 1
        built = build(system, scenario.bed, (lengths.mean_context, lengths.longest), seed)
        load = closed_load(lengths, number, num_more, seed)
        rate = closed_throughput(built, load, scenario.passes)
        runs.append(ClosedRun(load=scenario.name, system=system, seed=seed, num_requests=number, tokens_per_s=rate))
    return runs
