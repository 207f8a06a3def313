"""`moestro repro`: runs an experiment under a progress bar, shows its findings, and keeps them."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
from rich.console import Console

from moestro import __version__
from moestro.config.run_record import RunRecord, run_record
from moestro.repro.experiment import Experiment
from moestro.repro.results import FindingsT, LoadPart, Reproduced, merged, write_result
from moestro.repro.tables import claims_table
from moestro.workload.progress import progress_bar


def reproduce(
    console: Console, name: str, experiment: Experiment[FindingsT], out: Path | None
) -> Reproduced[FindingsT]:
    """Run an experiment, print its tables and claims, and write them to files.

    Args:
        name: the paper; files are named after it.
        out: directory of the result and of each load's findings, which are kept as soon as they are made. Findings of
            an equal plan and version are not made again; the console names those that another commit may have made.
            None means that nothing is written.

    Raises:
        ConfigError: nothing can be written to `out`.
    """
    conditions = run_record("simulated")  # before the runs: the checkout may change meanwhile
    parts: dict[str, RunRecord] = {}
    found = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=sum(map(experiment.num_runs, experiment.loads)))
        for load in experiment.loads:
            path = None if out is None else _part_path(out, name, load)
            part = _kept(experiment, load, path)
            if part is None:
                findings = experiment.run(load, lambda what: progress.update(task, advance=1, description=what))
                part = LoadPart(conditions, _plan(experiment, load), msgspec.Raw(msgspec.json.encode(findings)))
                if path is not None:
                    write_result(part, path)
            else:
                progress.advance(task, experiment.num_runs(load))
            parts[load] = part.conditions
            found.append(msgspec.json.decode(part.findings, type=experiment.findings_type))
    findings = merged(found)
    result = Reproduced(conditions=conditions, parts=parts, findings=findings, claims=experiment.claims(findings))
    for table in experiment.tables(findings):
        console.print(table, highlight=False)
    console.print(claims_table(result.claims))
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
