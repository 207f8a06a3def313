"""`moestro repro lmetric`: runs it under a progress bar, shows it, and keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moestro.errors import ConfigError
from moestro.sim.repro.claims import Claim, claims_of
from moestro.sim.repro.lmetric import QUICK, Findings, Plan, Reproduction
from moestro.sim.repro.show import print_findings


class Reproduced(msgspec.Struct, frozen=True):
    """What is written to the result file."""

    findings: Findings
    claims: list[Claim]


def reproduce_lmetric(
    console: Console, *, quick: bool, traces: Path | None, sources: tuple[str, ...] | None, num_requests: int | None
) -> Reproduced:
    """LMetric's tables and claims, simulated.

    Args:
        quick: one load, seven policies, no unseen seeds: under a minute.
        traces: see `Reproduction`.
        sources: names of loads; None: all, or those of the quick plan.
        num_requests: of each load; None: the plan's.

    Raises:
        ConfigError: a load is not known, or its trace is not at hand.
    """
    plan = QUICK if quick else Plan()
    if sources is not None:
        plan = replace(plan, sources=sources)
    if num_requests is not None:
        plan = replace(plan, num_requests=num_requests)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what, total=reproduction.num_runs)

        reproduction = Reproduction(plan, traces, step)
        missing = set(sources or ()) - {source.name for source in reproduction.sources}
        if missing:
            raise ConfigError(
                f"no load {', '.join(sorted(missing))}: Mooncake's traces are read from --traces DIRECTORY"
            )
        findings = reproduction.run()
    claims = claims_of(findings)
    print_findings(console, findings, claims)
    return Reproduced(findings, claims)


def save(reproduced: Reproduced, directory: Path, name: str) -> Path:
    """Write the result as JSON; returns where.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / f"{name}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(reproduced), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {directory} cannot be written: {error}") from error
    return path
