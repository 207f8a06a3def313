"""`moestro repro lmetric`: runs it under a progress bar, shows it, and keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from moestro import __version__
from moestro.errors import ConfigError
from moestro.repro.conditions import Conditions, this_run
from moestro.repro.lmetric.claims import claims_of
from moestro.repro.lmetric.experiment import Findings, Plan, Reproduction, merged
from moestro.repro.lmetric.reporting import Reproduced, bar, write_result
from moestro.repro.lmetric.show import print_findings


class Part(msgspec.Struct, frozen=True):
    """One load's findings, kept so that a long run can be stopped and go on, or be spread over processes."""

    conditions: Conditions
    plan: Plan
    findings: Findings


def reproduce_lmetric(console: Console, plan: Plan, traces: Path | None, out: Path | None) -> Reproduced[Findings]:
    """LMetric's tables and claims, simulated.

    Args:
        plan: see there.
        traces: see `Reproduction`.
        out: where the findings of each load are kept as soon as they are made; those of an equal plan and version
            are not made again, and what is not known to be of this very code is named. None: nowhere.

    Raises:
        ConfigError: a load is not known, or its trace is not at hand; or nothing can be written to `out`.
    """
    conditions = this_run()
    with bar(console) as progress:
        task = progress.add_task("")
        reproduction = Reproduction(plan, traces, lambda what: progress.update(task, advance=1, description=what))
        missing = set(plan.sources or ()) - {source.name for source in reproduction.sources}
        if missing:
            raise ConfigError(
                f"no load {', '.join(sorted(missing))}: Mooncake's traces are read from --traces DIRECTORY"
            )
        progress.update(task, total=sum(reproduction.num_runs(source) for source in reproduction.sources))
        parts: dict[str, Part] = {}
        for source in reproduction.sources:
            part = _kept(plan, source.name, out)
            if part is None:
                part = Part(conditions, replace(plan, sources=None), reproduction.run(source))
                if out is not None:
                    write_result(part, _part_path(out, source.name))
            else:
                progress.advance(task, reproduction.num_runs(source))
            parts[source.name] = part
    findings = merged([part.findings for part in parts.values()])
    claims = claims_of(findings)
    print_findings(console, findings, claims)
    made = {load: part.conditions for load, part in parts.items()}
    _warn(console, conditions, made, out)
    return Reproduced(conditions=conditions, parts=made, findings=findings, claims=claims)


def _warn(console: Console, now: Conditions, made: dict[str, Conditions], out: Path | None) -> None:
    """Name the parts that were kept, and may be of other code."""
    for load, then in made.items():
        if then is not now and not then.has_code_of(now):
            console.print(
                f"[yellow]{_part_path(out or Path(), load)} is of commit {then.commit or 'unknown'}, and this is"
                f" {now.commit or 'unknown'}: it was not made again; delete it if its code has changed[/]"
            )


def _part_path(out: Path, load: str) -> Path:
    return out / f"lmetric.{load}.json"


def _kept(plan: Plan, load: str, out: Path | None) -> Part | None:
    """What an equal plan of this version has found of this load."""
    if out is None or not _part_path(out, load).exists():
        return None
    try:
        part = msgspec.json.decode(_part_path(out, load).read_bytes(), type=Part)
    except msgspec.DecodeError:  # of another version
        return None
    is_ours = part.conditions.version == __version__ and part.plan == replace(plan, sources=None)
    return part if is_ours else None


def save(reproduced: Reproduced[Findings], directory: Path, name: str) -> Path:
    """Write the result as JSON; returns where.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / f"{name}.json"
    write_result(reproduced, path)
    return path
