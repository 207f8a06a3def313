"""`moestro sim`: runs every policy of a file over its workload, shows the figures, and writes a table of requests."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from moestro.config.cores import num_cores, run_jobs
from moestro.core.clock import NS_PER_MS, NS_PER_S
from moestro.errors import ConfigError
from moestro.sim.cluster import Int64s
from moestro.sim.figures import (
    REQUESTS_PER_UPDATE,
    FigureInterval,
    PolicyOutcome,
    SimReport,
    intervals,
    outcome_of,
    placement_notes,
    print_report,
    shown_figures,
)
from moestro.sim.records import is_router_record, is_shadow_record, read_router_record, read_shadow_record
from moestro.sim.replay import ShadowAnswer, WhatIf, WhatIfSettings, shadow_what_if, what_if
from moestro.sim.results import ANSWERED, NOT_YET_NS, REFUSED, GroupFigures, Results
from moestro.sim.scenario import OnArrival, Scenario, affinity_notes, at_load, make_scenario, run_with_figures
from moestro.sim.settings import SimSettings, read_settings
from moestro.workload.progress import progress
from moestro.workload.rows import RequestMaker
from moestro.workload.run_records import Slos
from moestro.workload.traces.request_record import UNKNOWN, RequestRecord, read_request_record

# Requests of all runs together from which processes pay: the start of one takes as long as some thousand requests.
_WORTH_PROCESSES = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class RunJob:
    """One run.

    Attributes:
        settings: settings of the simulation, with the seed of the run.
        directory: directory of relative paths.
        policy: position of its policy in the settings.
    """

    settings: SimSettings
    directory: Path
    policy: int


@dataclass(frozen=True, slots=True, eq=False)
class RunAnswer:
    """Results of one run.

    Attributes:
        title: title of the policy.
        seed: seed of the run.
        results: outcome of each request.
        group: figures of the groups of workers. None where each engine computes alone.
        session: conversation of each request, int64[n]. None means unknown.
        notes: limits of the prices.
    """

    title: str
    seed: int
    results: Results
    group: GroupFigures | None
    session: Int64s | None
    notes: tuple[str, ...]


def run_all(settings: SimSettings, directory: Path, num_processes: int | None) -> Iterator[RunAnswer]:
    """Run every policy with every seed; answers come seed by seed, in the order of the policies.

    The results are the same with any number of processes.

    Args:
        directory: directory of relative paths.
        num_processes: processes to run in. None means one for each core if the runs are long enough.
    """
    seeded = [msgspec.structs.replace(settings, seed=settings.seed + i, num_seeds=1) for i in range(settings.num_seeds)]
    jobs = [RunJob(each, directory, policy) for each in seeded for policy in range(len(settings.policies))]
    if num_processes is None:
        num_requests = len(scenario_of(seeded[0], directory).workload) * len(jobs)
        num_processes = num_cores() if num_requests >= _WORTH_PROCESSES else 1
    if min(num_processes, len(jobs)) < 2:
        yield from map(_run_with_progress, jobs)
        return
    with progress(f"{len(jobs)} runs", len(jobs)) as advance:
        for answer in run_jobs(run_job, jobs, num_processes):
            advance()
            yield answer


def run_job(job: RunJob, on_arrival: OnArrival = None) -> RunAnswer:
    """Run one policy with one seed."""
    scenario = scenario_of(job.settings, job.directory)
    policy = job.settings.policies[job.policy]
    results, group = run_with_figures(scenario, policy, on_arrival)
    workload = scenario.workload
    session = workload.rows.session if isinstance(workload, RequestMaker) else None
    return RunAnswer(policy.title, job.settings.seed, results, group, session, tuple(scenario.prices.notes()))


@lru_cache(maxsize=1)
def scenario_of(settings: SimSettings, directory: Path) -> Scenario:
    """Make the scenario that `settings` describe, or return it if it is that of the last call."""
    return make_scenario(settings, directory)


def _run_with_progress(job: RunJob) -> RunAnswer:
    num_requests = len(scenario_of(job.settings, job.directory).workload)
    title = job.settings.policies[job.policy].title
    with progress(title, num_requests, REQUESTS_PER_UPDATE) as advance:
        return run_job(job, advance)


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


COLUMNS = (
    "policy", "seed", "row", "session", "class", "status", "engine", "arrival_s", "queue_ms", "ttft_ms", "tpot_ms",
    "e2e_ms", "prompt_tokens", "output_tokens", "hit_tokens", "preemptions",
)  # fmt: skip
_STATUS = {ANSWERED: "answered", REFUSED: "refused"}


def write_request_table(path: Path, answers: Iterable[RunAnswer]) -> None:
    """Write the requests of all runs, in COLUMNS; a CSV file has an empty cell for what a request does not have.

    Args:
        path: file whose name ends in .csv or .jsonl.

    Raises:
        ConfigError: the name has another end, or the file cannot be written.
    """
    check_table_name(path)
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = (row for answer in answers for row in _rows(answer))
            _write_csv(file, rows) if path.suffix == ".csv" else _write_lines(file, rows)
    except OSError as error:
        raise ConfigError(f"--requests {path} cannot be written: {error.strerror}") from error


def check_table_name(path: Path) -> None:
    """Raise ConfigError for a name that tells no form."""
    if path.suffix not in {".csv", ".jsonl"}:
        raise ConfigError(f"--requests {path}: give a name that ends in .csv or .jsonl")


def _write_csv(file: TextIO, rows: Iterator[tuple[object, ...]]) -> None:
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows(rows)


def _write_lines(file: TextIO, rows: Iterator[tuple[object, ...]]) -> None:
    encode = msgspec.json.encode
    for row in rows:
        file.write(encode(dict(zip(COLUMNS, row, strict=True))).decode() + "\n")


def _rows(answer: RunAnswer) -> Iterator[tuple[object, ...]]:
    """Yield the rows of one run in the order of its workload."""
    results = answer.results
    num = len(results)
    ok = results.is_answered & (results.num_tokens > 0)
    gaps = results.num_tokens.astype(np.int64) - 1
    tpot_ns = np.full(num, np.nan)
    np.divide(results.last_token_ns - results.first_token_ns, gaps, out=tpot_ns, where=ok & (gaps > 0))
    is_admitted = results.admitted_ns != NOT_YET_NS
    sessions = [None] * num if answer.session is None else answer.session.tolist()
    columns = (
        [answer.title] * num,
        [answer.seed] * num,
        range(num),
        sessions,
        ["be" if is_be else "ls" for is_be in results.is_best_effort.tolist()],
        [_STATUS.get(status, "pending") for status in results.status.tolist()],
        [engine if engine >= 0 else None for engine in results.engine.tolist()],
        (results.arrival_ns / NS_PER_S).tolist(),
        _ms(results.admitted_ns - results.arrival_ns, is_admitted),
        _ms(results.first_token_ns - results.arrival_ns, ok),
        _ms(tpot_ns, ok & (gaps > 0)),
        _ms(results.last_token_ns - results.arrival_ns, ok),
        results.num_prompt_tokens.tolist(),
        results.num_tokens.tolist(),
        results.num_hit_tokens.tolist(),
        [None if num == UNKNOWN else num for num in results.num_preemptions.tolist()],
    )
    yield from zip(*columns, strict=True)


def _ms(values_ns: NDArray[np.int64] | NDArray[np.float64], is_known: NDArray[np.bool_]) -> list[float | None]:
    known = is_known.tolist()
    return [
        value if is_there else None for value, is_there in zip((values_ns / NS_PER_MS).tolist(), known, strict=True)
    ]
