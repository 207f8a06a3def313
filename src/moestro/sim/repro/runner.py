"""`moestro repro lmetric`: runs it under a progress bar, shows it, and keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from moestro.errors import ConfigError
from moestro.sim.repro.claims import claims_of
from moestro.sim.repro.lmetric import Findings, Plan, Reproduction, merged
from moestro.sim.repro.reporting import Claim, bar, write_result
from moestro.sim.repro.show import print_findings


class Reproduced(msgspec.Struct, frozen=True):
    """What is written to the result file."""

    findings: Findings
    claims: list[Claim]


class Part(msgspec.Struct, frozen=True):
    """One load's findings, kept so that a long run can be stopped and go on, or be spread over processes."""

    plan: Plan
    findings: Findings


def reproduce_lmetric(console: Console, plan: Plan, traces: Path | None, out: Path | None) -> Reproduced:
    """LMetric's tables and claims, simulated.

    Args:
        plan: see there.
        traces: see `Reproduction`.
        out: where the findings of each load are kept as soon as they are made; those of an equal plan are not
            made again. None: nowhere.

    Raises:
        ConfigError: a load is not known, or its trace is not at hand; or nothing can be written to `out`.
    """
    with bar(console) as progress:
        task = progress.add_task("")
        reproduction = Reproduction(plan, traces, lambda what: progress.update(task, advance=1, description=what))
        missing = set(plan.sources or ()) - {source.name for source in reproduction.sources}
        if missing:
            raise ConfigError(
                f"no load {', '.join(sorted(missing))}: Mooncake's traces are read from --traces DIRECTORY"
            )
        progress.update(task, total=sum(reproduction.num_runs(source) for source in reproduction.sources))
        parts = []
        for source in reproduction.sources:
            part = _kept(plan, source.name, out)
            if part is None:
                part = Part(replace(plan, sources=None), reproduction.run(source))
                if out is not None:
                    write_result(part, _part_path(out, source.name))
            else:
                progress.advance(task, reproduction.num_runs(source))
            parts.append(part.findings)
    findings = merged(parts)
    claims = claims_of(findings)
    print_findings(console, findings, claims)
    return Reproduced(findings, claims)


def _part_path(out: Path, load: str) -> Path:
    return out / f"lmetric.{load}.json"


def _kept(plan: Plan, load: str, out: Path | None) -> Part | None:
    """What an equal plan has found of this load."""
    if out is None or not _part_path(out, load).exists():
        return None
    try:
        part = msgspec.json.decode(_part_path(out, load).read_bytes(), type=Part)
    except msgspec.DecodeError:  # of another version
        return None
    return part if part.plan == replace(plan, sources=None) else None


def save(reproduced: Reproduced, directory: Path, name: str) -> Path:
    """Write the result as JSON; returns where.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / f"{name}.json"
    write_result(reproduced, path)
    return path
