"""`moestro sim`: runs every policy of a file over its workload, and shows the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from moestro.errors import ConfigError
from moestro.sim.figures.intervals import FigureInterval, intervals
from moestro.sim.figures.outcome import PolicyOutcome, SimReport, outcome_of, placement_notes
from moestro.sim.figures.results import Results
from moestro.sim.figures.show import print_report
from moestro.sim.figures.shown_figures import shown_figures
from moestro.sim.load.recorded_engines import WhatIfSettings
from moestro.sim.load.router_record import is_router_record, read_router_record
from moestro.sim.load.shadow_record import is_shadow_record, read_shadow_record
from moestro.sim.replay import WhatIf, what_if
from moestro.sim.runs import RunAnswer, run_all, scenario_of
from moestro.sim.saturation import at_load
from moestro.sim.scenario import affinity_notes
from moestro.sim.settings import SimSettings, read_settings
from moestro.sim.shadow import ShadowAnswer, shadow_what_if
from moestro.workload.run_records import Slos
from moestro.workload.traces.request_record import RequestRecord, read_request_record


@dataclass(frozen=True, slots=True, eq=False)
class SimAnswer:
    """A finished simulation.

    Attributes:
        report: all figures.
        runs: the run of each policy and seed, in the order of the report's outcomes.
    """

    report: SimReport
    runs: list[RunAnswer]

    def first_runs(self) -> list[tuple[str, Results]]:
        """Title and results of each policy with the first seed, for pictures."""
        return [(run.title, run.results) for run in self.runs if run.seed == self.runs[0].seed]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoices:
    """Choices of the command line that replace those of a file; None leaves the file's.

    Attributes:
        load: share of saturation that is offered.
        num_seeds: number of seeds.
        kv_offloading_size: GiB of host memory of each engine.
        num_processes: processes to run in; None means one for each core if that pays.
    """

    load: float | None = None
    num_seeds: int | None = None
    kv_offloading_size: float | None = None
    num_processes: int | None = None


def run_scenario(path: Path, choices: RunChoices = RunChoices()) -> SimAnswer:
    """Run the simulation that the TOML file at `path` describes, and print its report.

    Raises:
        ConfigError: a setting is unknown or out of range, or a file cannot be read.
    """
    settings = read_settings(
        path, load=choices.load, num_seeds=choices.num_seeds, kv_offloading_size=choices.kv_offloading_size
    )
    answer = simulate(settings, path.parent, choices.num_processes)
    print_report(Console(), answer.report)
    return answer


def replay_records(paths: Sequence[Path], settings: WhatIfSettings) -> SimAnswer:
    """Replay the records of servers, or those of routers, and print the changes under other policies.

    Raises:
        ConfigError: a file is no record, records cannot be merged, or step durations are unknown.
    """
    answer: WhatIf | ShadowAnswer
    if len(paths) == 1 and is_shadow_record(paths[0]):
        answer = shadow_what_if(read_shadow_record(paths[0]), settings)
    else:
        answer = what_if(read_records(paths), settings)
    console = Console()
    print_report(console, answer.report)
    for warning in answer.warnings():
        console.print(f"[yellow]{warning}[/]", highlight=False, soft_wrap=True)
    for sentence in answer.sentences():
        console.print(sentence, highlight=False, soft_wrap=True)
    runs = [RunAnswer(title, 0, results, None, None, ()) for title, results in answer.runs]
    return SimAnswer(answer.report, runs)


def read_records(paths: Sequence[Path]) -> RequestRecord:
    """Read the records of servers, merged, or those of routers before the same engines, joined.

    Raises:
        ConfigError: a file is no record, or records cannot be merged.
    """
    of_routers = [path for path in paths if is_router_record(path)]
    if 0 < len(of_routers) < len(paths):
        raise ConfigError(
            f"{of_routers[0]} is the record of a router, which has the requests of all its engines: replay it with"
            " records of other routers alone, or merge records of servers"
        )
    if shadows := [path for path in paths if len(paths) > 1 and is_shadow_record(path)]:
        raise ConfigError(f"{shadows[0]} is the record of a shadow: replay it on its own")
    return read_router_record(*paths) if of_routers else read_request_record(*paths)


def simulate(settings: SimSettings, directory: Path, num_processes: int | None = 1) -> SimAnswer:
    """Run the simulation that `settings` describe; relative paths start at `directory`.

    Args:
        num_processes: as in `runs.run_all`. Several start this program again, so a script needs a main guard for them.
    """
    given, saturation = settings, None
    if settings.workload.load is not None:
        settings, saturation = at_load(settings, directory)
    slos = None if settings.slos is None else Slos(**msgspec.structs.asdict(settings.slos))
    runs = list(run_all(settings, directory, num_processes))
    outcomes = [outcome_of(run.title, run.results, slos, run.group, run.seed) for run in runs]
    first = msgspec.structs.replace(settings, num_seeds=1)
    scenario = scenario_of(first, directory)
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    report = SimReport(
        workload=scenario.source,
        is_generated=scenario.is_generated,
        settings=msgspec.to_builtins(given),
        saturation=saturation,
        notes=(
            *notes,
            *scenario.notes,
            *affinity_notes(settings.policies, scenario.named),
            *placement_notes(outcomes),
        ),
        outcomes=tuple(outcomes),
        intervals=_intervals(outcomes) if settings.num_seeds > 1 else {},
    )
    return SimAnswer(report, runs)


def _intervals(outcomes: Sequence[PolicyOutcome]) -> dict[str, dict[str, FigureInterval]]:
    by_title: dict[str, list[dict[str, float | None]]] = {}
    for outcome, figures in zip(outcomes, shown_figures(outcomes), strict=True):
        by_title.setdefault(outcome.title, []).append(figures)
    base = by_title[outcomes[0].title]
    return {title: intervals(runs, base) for title, runs in by_title.items()}


def write_json(path: Path, report: SimReport) -> None:
    """Write `report` as indented JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
