"""`moestro repro`: runs an experiment under a progress bar, shows its findings, and keeps them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import msgspec
from rich.console import Console

from moestro import __version__
from moestro.config.cores import num_cores, run_jobs
from moestro.config.run_record import RunRecord, run_record
from moestro.repro.experiment import Experiment, show_no_step
from moestro.repro.results import (
    FindingsT,
    LoadPart,
    Reproduced,
    StoredClaim,
    claims_table,
    merged,
    quick_claims_table,
    write_result,
)
from moestro.workload.progress import progress_bar


@dataclass(frozen=True, slots=True)
class _LoadJob(Generic[FindingsT]):
    """A load of an experiment.

    Attributes:
        conditions: conditions of the run.
        path: file of the part. None means that nothing is written.
    """

    experiment: Experiment[FindingsT]
    load: str
    conditions: RunRecord
    path: Path | None


def reproduce(
    console: Console,
    name: str,
    experiment: Experiment[FindingsT],
    out: Path | None,
    num_processes: int | None = 1,
    stored: Sequence[StoredClaim] | None = None,
) -> Reproduced[FindingsT]:
    """Run an experiment, print its tables and claims, and write them to files.

    Args:
        name: the paper; files are named after it.
        num_processes: processes among which the loads are spread. None means one for each core. The findings are the
            same with any number.
        out: directory of the result and of each load's findings, which are kept as soon as they are made. Findings of
            an equal plan and version are not made again; the console names those that another commit may have made.
            None means that nothing is written.
        stored: claims of the stored run, which are shown beside those of a quick run. A quick run is too small to
            judge a paper, so none of its own claims is judged. None means that the run is not quick.

    Raises:
        ConfigError: nothing can be written to `out`.
    """
    conditions = run_record("simulated")  # before the runs: the checkout may change meanwhile
    jobs = [
        _LoadJob(experiment, load, conditions, None if out is None else _part_path(out, name, load))
        for load in experiment.loads
    ]
    parts = _parts(console, jobs, num_cores() if num_processes is None else num_processes)
    findings = merged([msgspec.json.decode(part.findings, type=experiment.findings_type) for part in parts.values()])
    claims = experiment.claims(findings)
    result = Reproduced(
        conditions=conditions,
        parts={load: part.conditions for load, part in parts.items()},
        findings=findings,
        claims=claims if stored is None else [msgspec.structs.replace(claim, holds=None) for claim in claims],
    )
    for table in experiment.tables(findings):
        console.print(table, highlight=False)
    console.print(claims_table(result.claims) if stored is None else quick_claims_table(result.claims, stored))
    if out is not None:
        _warn(console, name, result, out)
        write_result(result, out / f"{name}.json")
        console.print(f"written: {out / f'{name}.json'}")
    return result


def save_pictures(name: str, experiment: Experiment[FindingsT], findings: FindingsT, directory: Path) -> list[Path]:
    """Draw the findings as PNG files and return their paths. The extra `plots` is needed."""
    paths = []
    for picture, figure in importlib.import_module(experiment.drawing).pictures(experiment, findings).items():
        paths.append(directory / f"{name}_{picture}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _parts(console: Console, jobs: Sequence[_LoadJob[FindingsT]], num_processes: int) -> dict[str, LoadPart]:
    """The part of each load, kept or made now, in the order of the jobs."""
    kept = {job.load: _kept(job.experiment, job.load, job.path) for job in jobs}
    left = [job for job in jobs if kept[job.load] is None]
    with progress_bar(console) as progress:
        task = progress.add_task("", total=sum(map(_num_runs, jobs)))
        progress.advance(task, sum(map(_num_runs, jobs)) - sum(map(_num_runs, left)))

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what)

        def made() -> Iterator[LoadPart]:
            if min(num_processes, len(left)) < 2:
                yield from (_make_part(job, step) for job in left)
                return
            for job, part in zip(left, run_jobs(_make_part, left, num_processes), strict=True):
                progress.update(task, advance=_num_runs(job), description=job.load)
                yield part

        new = dict(zip((job.load for job in left), made(), strict=True))
    return {load: part or new[load] for load, part in kept.items()}


def _num_runs(job: _LoadJob[FindingsT]) -> int:
    return job.experiment.num_runs(job.load)


def _make_part(job: _LoadJob[FindingsT], step: Callable[[str], None] = show_no_step) -> LoadPart:
    """Run a load, and keep its part as soon as it is made."""
    findings = job.experiment.run(job.load, step)
    raw = msgspec.Raw(msgspec.json.encode(findings))
    part = LoadPart(job.conditions, _plan(job.experiment, job.load), raw)
    if job.path is not None:
        write_result(part, job.path)
    return part


def _warn(console: Console, name: str, result: Reproduced[FindingsT], out: Path) -> None:
    """Name the kept parts that other code may have made."""
    for load, then in result.parts.items():
        if then is not result.conditions and not then.has_code_of(result.conditions):
            console.print(
                f"[yellow]{_part_path(out, name, load)} is of commit {then.commit or 'unknown'}, and this run is of"
                f" {result.conditions.commit or 'unknown'}: the file was reused; delete it if its code has changed[/]"
            )


def _part_path(out: Path, name: str, load: str) -> Path:
    return out / f"{name}.{load}.json"


def _plan(experiment: Experiment[FindingsT], load: str) -> object:
    """Return the plan of a load in the form in which JSON restores it."""
    return msgspec.json.decode(msgspec.json.encode(experiment.plan_of(load)))


def _kept(experiment: Experiment[FindingsT], load: str, path: Path | None) -> LoadPart | None:
    """Return the kept findings of this load, if an equal plan of this version made them."""
    if path is None or not path.exists():
        return None
    try:
        part = msgspec.json.decode(path.read_bytes(), type=LoadPart)
        msgspec.json.decode(part.findings, type=experiment.findings_type)
    except msgspec.DecodeError:  # another version wrote it
        return None
    is_current = part.conditions.moestro == __version__ and part.plan == _plan(experiment, load)
    return part if is_current else None
