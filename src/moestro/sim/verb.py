"""`moestro sim`: runs every policy of a file over its workload, and shows the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from moestro.errors import ConfigError
from moestro.sim.outcome import SimReport, outcome_of
from moestro.sim.replay import what_if
from moestro.sim.results import Results
from moestro.sim.scenario import make_scenario, run_with_figures
from moestro.sim.settings import SimSettings, read_settings
from moestro.sim.show import REQUESTS_PER_UPDATE, print_report
from moestro.workload.progress import progress
from moestro.workload.request_record import read_request_record
from moestro.workload.slos import Slos

Runs = list[tuple[str, Results]]


def run_scenario(path: Path) -> tuple[SimReport, Runs]:
    """Run the simulation that the TOML file at `path` describes, and print its report.

    Returns:
        The report, and the title and results of each policy.

    Raises:
        ConfigError: a setting is unknown or out of range, or a file cannot be read.
    """
    settings = read_settings(path)
    report, runs = simulate(settings, path.parent)
    print_report(Console(), report)
    return report, runs


def replay_record(path: Path, policies: Sequence[str], cost: str | None) -> tuple[SimReport, Runs]:
    """Replay a server's record, and print the changes under other policies.

    Args:
        path: file that `moestro serve --record` wrote.
        policies: names of routing policies.
        cost: cost of the engines' steps, as for `replay.what_if`.

    Raises:
        ConfigError: the file is not a record, or step durations are unknown.
    """
    answer = what_if(read_request_record(path), policies, cost)
    console = Console()
    print_report(console, answer.report)
    for warning in answer.warnings():
        console.print(f"[yellow]{warning}[/]", highlight=False, soft_wrap=True)
    for sentence in answer.sentences():
        console.print(sentence, highlight=False, soft_wrap=True)
    return answer.report, answer.runs


def simulate(settings: SimSettings, directory: Path) -> tuple[SimReport, Runs]:
    """Run the simulation that `settings` describe; relative paths start at `directory`."""
    scenario, runs, outcomes = make_scenario(settings, directory), [], []
    slos = None if settings.slos is None else Slos(**msgspec.structs.asdict(settings.slos))
    for policy in settings.policies:
        with progress(policy.title, len(scenario.workload), REQUESTS_PER_UPDATE) as advance:
            results, group = run_with_figures(scenario, policy, advance)
        runs.append((policy.title, results))
        outcomes.append(outcome_of(policy.title, results, slos, group))
    report = SimReport(
        workload=scenario.source,
        is_generated=scenario.is_generated,
        settings=msgspec.to_builtins(settings),
        notes=tuple(scenario.prices.notes()),
        outcomes=tuple(outcomes),
    )
    return report, runs


def write_json(path: Path, report: SimReport) -> None:
    """Write `report` as indented JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
