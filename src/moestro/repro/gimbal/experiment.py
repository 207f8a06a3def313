"""Gimbal's experiment (arXiv 2602.21626 and the abstract of arXiv 2606.15177): every system on every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType

from moestro.repro.experiment import PartsExperiment, chosen_parts
from moestro.repro.gimbal import GimbalSettings
from moestro.repro.gimbal.claims import claims_of
from moestro.repro.gimbal.findings import GimbalCell, GimbalFindings, ttft_p99
from moestro.repro.gimbal.loads import shaped_load, tenant_load, user_load
from moestro.repro.gimbal.parts import P99_GOAL_MS, QUICK, GimbalPart, whole
from moestro.repro.gimbal.serving import Run, serve, serve_prefixes
from moestro.repro.gimbal.systems import SYSTEMS
from moestro.repro.gimbal.tables import tables_of
from moestro.repro.results import Claim
from moestro.repro.testbed import TimedLoad

# The search for the rate at which the baseline's P99 TTFT is near the age threshold doubles, then halves the interval.
_FIRST_RATE, _NUM_HALVINGS, _NEAR = 4.0, 5, 0.1
# Mean delay of a request between the client and the router: asyncio, HTTP, tokenizing. An assumption; only that it
# changes the order of requests that come close together matters.
JITTER_S = 0.01


class GimbalExperiment(PartsExperiment[GimbalFindings, GimbalPart]):
    """Runs parts.

    Args:
        parts: what is run.
        trace: file of request lengths. None means generated lengths.
    """

    findings_type = GimbalFindings
    drawing = "moestro.repro.gimbal.draw"

    def __init__(self, parts: Sequence[GimbalPart], trace: Path | None) -> None:
        super().__init__(parts)
        self._trace = trace

    def plan_of(self, load: str) -> object:
        """The part, its systems, and the name of the trace."""
        part = self.parts[load]
        return part, [SYSTEMS[name] for name in part.systems], None if self._trace is None else self._trace.name

    def num_runs(self, load: str) -> int:
        """One for each combination; the search of a part `near_age` counts as one."""
        part = self.parts[load]
        num_rates = max(len(part.rates), 1)
        num_settings = max(len(part.kv_blocks), len(part.skews), 1)
        if part.kind == "prefix":
            return len(part.systems) * part.num_runs
        repeats = len(part.repeated) * (len(part.seeds) - 1)
        return len(part.systems) * num_rates * num_settings + repeats + (part.kind == "near_age")

    def run(self, load: str, step: Callable[[str], None]) -> GimbalFindings:
        """Run one part."""
        part = self.parts[load]
        about = "generated like BurstGPT's" if self._trace is None else f"of {self._trace.name}"
        findings = GimbalFindings(about_lengths=[f"{load}: {'users' if part.users else about}"])
        if part.kind == "prefix":
            for run in self._runs(part):
                step(f"{load}: {run.system}, run {run.seed}")
                assert part.users is not None, "a part `prefix` has users"
                users = user_load(part.users, part.num_requests, run.rate, JITTER_S, run.seed)
                findings.prefixes.append(serve_prefixes(part.bed, users, run))
            return findings
        if part.kind == "near_age":
            step(f"{load}: the rate at which P99 TTFT is {P99_GOAL_MS / 1e3:g} s")
            part = replace(part, rates=(self._rate_near_age(part),))
        for run in self._runs(part):
            step(f"{load} at {run.rate:g}/s {run.setting}: {run.system}")
            findings.cells.append(self._serve(part, run))
        return findings

    def _runs(self, part: GimbalPart) -> Iterator[Run]:
        if part.kind == "prefix":
            for number in range(part.num_runs):
                yield from (Run(load=part.name, rate=part.rates[0], system=s, seed=number) for s in part.systems)
            return
        settings = [f"{each}" for each in (*part.kv_blocks, *part.skews)] or [""]
        for setting in settings:
            for rate in part.rates:
                for system in part.systems:
                    yield Run(load=part.name, rate=rate, system=system, seed=part.seeds[0], setting=setting)
        for seed in part.seeds[1:]:
            for system in part.repeated:
                yield Run(load=part.name, rate=part.rates[-1], system=system, seed=seed)

    def _serve(self, part: GimbalPart, run: Run) -> GimbalCell:
        bed = part.bed
        if part.kind == "kv":
            bed = replace(bed, num_blocks=int(run.setting))
        if part.kind == "skew":
            bed = replace(bed, popularity=replace(bed.popularity, skew=float(run.setting)))
        return serve(bed, self._load(part, run.rate, run.seed), run)

    def _load(self, part: GimbalPart, rate: float, seed: int) -> TimedLoad:
        load = shaped_load(self._trace, part.shape, part.num_requests, rate, seed)
        return tenant_load(load.rows, part.tenants, rate, seed) if part.kind == "tenants" else load

    def _rate_near_age(self, part: GimbalPart) -> float:
        """Find the rate at which the baseline's P99 TTFT is near the goal, by halving."""

        def p99_ms(rate: float) -> float:
            return ttft_p99(self._serve(part, Run(load=part.name, rate=rate, system=part.systems[0], seed=0)))

        low, high = _FIRST_RATE, 2 * _FIRST_RATE
        while p99_ms(high) < P99_GOAL_MS:
            low, high = high, 2 * high
        rate = (low + high) / 2
        for _ in range(_NUM_HALVINGS):
            found = p99_ms(rate)
            if abs(found / P99_GOAL_MS - 1) < _NEAR:
                break
            low, high = (rate, high) if found < P99_GOAL_MS else (low, rate)
            rate = (low + high) / 2
        return round(rate, 2)

    def claims(self, findings: GimbalFindings) -> list[Claim]:
        """The papers' claims, in their order."""
        return claims_of(findings)

    def tables(self, findings: GimbalFindings) -> Iterator[RenderableType]:
        """Tables of each kind of part, then a line about each system."""
        yield from tables_of(self.parts, findings)


def make_experiment(settings: GimbalSettings) -> GimbalExperiment:
    """The experiment under these settings.

    Raises:
        ConfigError: --loads names one that is not in the plan.
    """
    parts = QUICK if settings.quick else whole(settings.num_requests)
    return GimbalExperiment(chosen_parts(parts, settings.loads), settings.trace)
