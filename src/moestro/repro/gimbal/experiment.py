"""Gimbal's experiment (arXiv 2602.21626 and the abstract of arXiv 2606.15177): every system on every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType

from moestro.errors import ConfigError
from moestro.repro.experiment import PartsExperiment, chosen_parts
from moestro.repro.gimbal import GimbalSettings
from moestro.repro.gimbal.claims import claims_of
from moestro.repro.gimbal.findings import GimbalCell, GimbalFindings, ttft_p99
from moestro.repro.gimbal.loads import (
    RunName,
    fitting,
    recorded_routing,
    serve,
    serve_prefixes,
    shaped_load,
    tenant_load,
    user_load,
    with_domains,
)
from moestro.repro.gimbal.paper import FIGURES, P99_GOAL_MS, QUICK, SETUP, GimbalPart, whole
from moestro.repro.gimbal.systems import BLOCK_SIZE, SYSTEMS
from moestro.repro.gimbal.tables import tables_of
from moestro.repro.results import Claim
from moestro.repro.testbed import TimedLoad

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
    setup, figures = SETUP, FIGURES

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
        at_rates = len(part.systems) * max(len(part.rates), 1) + len(part.repeated) * (len(part.seeds) - 1)
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
        for system in part.repeated:
            yield RunName(load=part.name, rate=part.rates[-1], system=system, seed=seed, setting=setting)
