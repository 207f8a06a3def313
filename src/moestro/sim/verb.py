"""`moestro sim`: run every policy of a file over its workload, and show what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from moestro.errors import ConfigError
from moestro.sim.outcome import SimReport, outcome_of
from moestro.sim.results import Results
from moestro.sim.scenario import Scenario, make_scenario, run
from moestro.sim.settings import PolicySettings, SimSettings
from moestro.sim.show import print_report, progress
from moestro.workload.slos import Slos


def simulate(settings: SimSettings, directory: Path) -> tuple[SimReport, list[tuple[str, Results]]]:
    """Run what `settings` describe.

    Args:
        directory: where their relative paths begin.

    Returns:
        The report, and each policy's title and results.

    Raises:
        ConfigError: something is not known, or does not fit.
    """
    scenario = make_scenario(settings, directory)
    return simulate_policies(scenario, settings, settings.policies)


def simulate_policies(
    scenario: Scenario, settings: SimSettings, policies: Sequence[PolicySettings]
) -> tuple[SimReport, list[tuple[str, Results]]]:
    """`simulate` for a scenario that was made already."""
    runs: list[tuple[str, Results]] = []
    for policy in policies:
        with progress(policy.title, len(scenario.workload)) as advance:
            runs.append((policy.title, run(scenario, policy, settings, advance)))
    slos = None if settings.slos is None else Slos(**msgspec.structs.asdict(settings.slos))
    report = SimReport(
        workload=scenario.source,
        is_generated=scenario.is_generated,
        settings=msgspec.to_builtins(settings),
        outcomes=tuple(outcome_of(title, results, slos) for title, results in runs),
    )
    return report, runs


def write_json(path: Path, report: SimReport) -> None:
    """Write `report`, indented.

    Raises:
        ConfigError: there is no such place.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error


def show(report: SimReport) -> None:
    """Print the tables."""
    print_report(Console(), report)
