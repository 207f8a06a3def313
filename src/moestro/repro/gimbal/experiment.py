"""Gimbal's experiment (arXiv 2602.21626, abstract of 2606.15177): every system on every part, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from moestro.errors import ConfigError
from moestro.repro.experiment import PartsExperiment, chosen_parts
from moestro.repro.gimbal import GimbalSettings
from moestro.repro.gimbal.claims import CLAIMS, claims_of
from moestro.repro.gimbal.loads import (
    CELL_FIGURES,
    GimbalCell,
    GimbalFindings,
    RunName,
    fitting,
    recorded_routing,
    serve,
    serve_prefixes,
    shaped_load,
    tenant_load,
    ttft_p99,
    user_load,
    with_domains,
)
from moestro.repro.gimbal.paper import FIGURES, P99_GOAL_MS, QUICK, SETUP, GimbalPart, whole
from moestro.repro.gimbal.systems import BLOCK_SIZE, SYSTEMS
from moestro.repro.results import Claim
from moestro.repro.testbed import TimedLoad

_CAPTION = "simulated; means over seeds; in brackets the change from the first system, over the seeds of both"


def tables_of(parts: Mapping[str, GimbalPart], findings: GimbalFindings) -> Iterator[RenderableType]:
    """A table for each part, setting and rate, the prefix hits, then a line about each system."""
    for load in findings.loads:
        for setting in findings.settings(load):
            for rate in findings.rates(load):
                table = _latencies(parts[load], findings, rate, setting)
                if table.row_count:
                    yield table
    yield from (_prefixes(parts[load], findings) for load in dict.fromkeys(each.load for each in findings.prefixes))
    for load, about in findings.about_lengths.items():
        yield f"{load}: lengths {about}"
    for name in dict.fromkeys(name for load in parts for name in parts[load].systems):
        yield f"{name}: {SYSTEMS[name].about}"


def _latencies(part: GimbalPart, findings: GimbalFindings, rate: float, setting: str) -> Table:
    level = findings.levels.get(f"{part.name} {setting}".strip())
    title = f"{part.name} {setting}, {rate:g} requests/s" + (f", {part.finds} {level:g}" if level else "")
    table = Table(
        "system",
        *CELL_FIGURES,
        "plans",
        "moved, GB",
        "stalls, ms",
        "balance",
        "branches",
        title=title,
        caption=_CAPTION,
    )
    base = findings.of(part.name, rate, part.systems[0], setting)
    for system in part.systems:
        cells = findings.of(part.name, rate, system, setting)
        if not cells:
            continue
        row = []
        for name, of in CELL_FIGURES.items():
            change = findings.change(name, cells, base)
            shown = "" if change is None or system == part.systems[0] else f" ({change:+.1%})"
            row.append(f"{np.mean([of(cell) for cell in cells]):.4g}{shown}")
        first = cells[0]
        branches = ", ".join(f"{name} {count}" for name, count in sorted(first.branches.items()))
        table.add_row(
            system, *row, f"{first.num_plans}", f"{first.moved_gb:.1f}", f"{first.stall_ms:.0f}",
            f"{first.balance:.3f}" if first.balance else "", branches,
        )  # fmt: skip
    return table


def _prefixes(part: GimbalPart, findings: GimbalFindings) -> Table:
    numbers = sorted({each.run for each in findings.prefixes if each.load == part.name})
    table = Table(
        "system", *(f"run {number}" for number in numbers), "mean hits", "hit rate",
        title=f"{part.name}: blocks of 16 tokens found in the prefix caches, of the same requests in each run",
        caption="simulated",
    )  # fmt: skip
    for system in part.systems:
        runs = [each for each in findings.prefixes if (each.load, each.system) == (part.name, system)]
        hits = [each.hit_blocks for each in sorted(runs, key=lambda each: each.run)]
        rate = np.mean([each.hit_rate for each in runs])
        table.add_row(system, *(f"{each:,}" for each in hits), f"{np.mean(hits):,.0f}", f"{rate:.2%}")
    return table


# The search for the level (factor on steps, or rate) at which the baseline's P99 TTFT is near the age threshold.
_FIRST_LEVEL = {"slowdown": 16.0, "rate": 48.0}
_MOST_TRIALS, _NEAR = 8, 0.05
# Mean delay of a request between the client and the router: asyncio, HTTP, tokenizing. An assumption; only that it
# changes the order of requests that come close together matters.
JITTER_S = 0.01


class GimbalExperiment(PartsExperiment[GimbalFindings, GimbalPart]):
    """Runs parts.

    Args:
        parts: what is run.
        trace: file of request lengths. None means generated lengths.
        recording: files of recorded routing and of its index. None means that no part needs it.
    """

    findings_type = GimbalFindings
    drawing = "moestro.repro.gimbal.draw"
    setup, figures, claim_rows = SETUP, FIGURES, CLAIMS

    def __init__(
        self, parts: Sequence[GimbalPart], trace: Path | None, recording: tuple[Path, Path] | None = None
    ) -> None:
        super().__init__(parts)
        self._trace, self._recording = trace, recording

    def plan_of(self, load: str) -> object:
        """The part, its systems, and the names of the trace and of the recorded routing."""
        part = self.parts[load]
        recording = self._recording[0].name if self._recording is not None and part.routings else None
        trace = None if self._trace is None else self._trace.name
        return part, [SYSTEMS[name] for name in part.systems], trace, recording

    def num_runs(self, load: str) -> int:
        """One for each combination; the search for a level counts as one for each setting."""
        part = self.parts[load]
        if part.counts_hits:
            return len(part.systems) * part.num_runs
        at_rates = len(part.systems) * (max(len(part.rates), 1) + len(part.seeds) - 1)
        return len(part.settings) * (at_rates + bool(part.finds))

    def run(self, load: str, step: Callable[[str], None]) -> GimbalFindings:
        """Run one part."""
        part = self.parts[load]
        if part.counts_hits:
            return self._run_prefixes(part, step)
        about = self._about_lengths if part.users is None else f"generated like {part.users.like}"
        findings = GimbalFindings(about_lengths={load: about})
        for setting in part.settings:
            here, level = part, None
            if part.finds:
                step(f"{load} {setting}: the {part.finds} at which P99 TTFT is {P99_GOAL_MS / 1e3:g} s")
                level = self._find(part, setting)
                findings.levels[f"{load} {setting}".strip()] = level
                here = _at_level(part, level)
            for run in _runs(here, setting):
                step(f"{load} at {run.rate:g}/s {setting}: {run.system}, seed {run.seed}")
                findings.cells.append(self._serve(here, run))
        return findings

    def run_missing(self, load: str, findings: GimbalFindings, step: Callable[[str], None]) -> None:
        """Run what a part has and `findings` lack, at the levels that `findings` have."""
        part = self.parts[load]
        has = {(cell.load, cell.rate, cell.system, cell.seed, cell.setting) for cell in findings.cells}
        for setting in part.settings:
            here = part if not part.finds else _at_level(part, findings.levels[f"{load} {setting}".strip()])
            for run in _runs(here, setting):
                if (load, run.rate, run.system, run.seed, setting) not in has:
                    step(f"{load} at {run.rate:g}/s {setting}: {run.system}, seed {run.seed}")
                    findings.cells.append(self._serve(here, run))

    def _run_prefixes(self, part: GimbalPart, step: Callable[[str], None]) -> GimbalFindings:
        users = part.users
        assert users is not None, "a part about prefix hits has users"
        findings = GimbalFindings(about_lengths={part.name: f"generated like {users.like}"})
        for number in range(part.num_runs):
            load = user_load(users, part.num_requests, part.rates[0], JITTER_S, number)
            for system in part.systems:
                step(f"{part.name}: {system}, run {number}")
                run = RunName(load=part.name, rate=part.rates[0], system=system, seed=number)
                findings.prefixes.append(serve_prefixes(part.bed, load, run))
        return findings

    @property
    def _about_lengths(self) -> str:
        return "generated like BurstGPT's" if self._trace is None else f"of {self._trace.name}"

    def _serve(self, part: GimbalPart, run: RunName) -> GimbalCell:
        bed, recording = part.bed_of(run.setting), self._recording
        routing = recorded_routing(*recording) if recording is not None and bed.routing != "drawn" else None
        return serve(bed, self._load(part, run), run, routing)

    def _load(self, part: GimbalPart, run: RunName) -> TimedLoad:
        tenants = part.tenants
        if part.users is not None and tenants is not None:
            return with_domains(user_load(part.users, part.num_requests, run.rate, JITTER_S, run.seed), tenants)
        load = shaped_load(self._trace, part.shape, part.num_requests, run.rate, run.seed)
        num_blocks = part.bed_of(run.setting).num_blocks
        if num_blocks is not None:
            load = replace(load, rows=fitting(load.rows, num_blocks * BLOCK_SIZE))
        return load if tenants is None else tenant_load(load.rows, tenants, run.rate, run.seed)

    def _find(self, part: GimbalPart, setting: str) -> float:
        """Find the level at which the baseline's P99 TTFT is near the goal; it grows with the level."""
        level, low, high = _FIRST_LEVEL[part.finds], 0.0, float("inf")
        for _ in range(_MOST_TRIALS):
            here = _at_level(part, level)
            run = RunName(
                load=part.name, rate=here.rates[-1], system=part.systems[0], seed=part.seeds[0], setting=setting
            )
            p99_ms = ttft_p99(self._serve(here, run))
            if abs(p99_ms / P99_GOAL_MS - 1) < _NEAR:
                break
            low, high = (level, high) if p99_ms < P99_GOAL_MS else (low, level)
            level *= min(max(P99_GOAL_MS / p99_ms, 0.5), 2.0)  # exact where no request waits
            if not low < level < high:
                level = (low * high) ** 0.5
        return round(level, 2)

    def claims(self, findings: GimbalFindings) -> list[Claim]:
        """The papers' claims, in their order."""
        return claims_of(findings)

    def tables(self, findings: GimbalFindings) -> Iterator[RenderableType]:
        """Tables of each kind of part, then a line about each system."""
        yield from tables_of(self.parts, findings)


def make_experiment(settings: GimbalSettings) -> GimbalExperiment:
    """The experiment under these settings.

    Raises:
        ConfigError: --loads names one that is not in the plan, or only one of --routing and --routing-index is given.
    """
    files = (settings.routing, settings.routing_index)
    if (files[0] is None) != (files[1] is None):
        raise ConfigError("--routing and --routing-index name one recording: give both, or none")
    recording = None if files[0] is None or files[1] is None else (files[0], files[1])
    parts = QUICK if settings.quick else whole(settings.num_requests, has_recording=recording is not None)
    return GimbalExperiment(chosen_parts(parts, settings.loads), settings.trace, recording)


def _at_level(part: GimbalPart, level: float) -> GimbalPart:
    """The part with a slower engine, or at another rate."""
    if part.finds == "slowdown":
        return replace(part, bed=replace(part.bed, slowdown=level))
    return replace(part, rates=(level,))


def _runs(part: GimbalPart, setting: str) -> Iterator[RunName]:
    for rate in part.rates:
        for system in part.systems:
            yield RunName(load=part.name, rate=rate, system=system, seed=part.seeds[0], setting=setting)
    for seed in part.seeds[1:]:
        for system in part.systems:
            yield RunName(load=part.name, rate=part.rates[-1], system=system, seed=seed, setting=setting)
