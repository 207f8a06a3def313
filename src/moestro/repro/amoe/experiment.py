"""AMoE's experiment (arXiv 2505.08944): `async` and what it is compared with, at every rate of every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import RenderableType

from moestro.repro import ReproSettings
from moestro.repro.amoe.claims import CLAIMS, claims_of
from moestro.repro.amoe.loads import (
    LENGTHS,
    AmoeCell,
    AmoeFindings,
    BatchPoint,
    ClosedRun,
    ItemMeans,
    Ladder,
    Seen,
    itl,
    itl_p99,
    mean_stall,
    of_bound,
    open_load,
    requests,
    serve_open,
    throughput,
)
from moestro.repro.amoe.paper import FIGURES, QUICK, SETUP, WHOLE, Part
from moestro.repro.amoe.systems import ABOUT, ASYNC, Bed, Built, build
from moestro.repro.experiment import PartsExperiment, chosen_parts
from moestro.repro.results import Claim, Column, grid_table

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # figure 3
_COLUMNS = (
    Column("tokens/s", throughput),
    Column("of its bound", of_bound),
    Column("ITL, ms", itl),
    Column("ITL P99, ms", itl_p99),
    Column("requests/s", requests),
    Column("mean stall", mean_stall),
)


class AmoeExperiment(PartsExperiment[AmoeFindings, Part]):
    """Runs parts."""

    findings_type = AmoeFindings
    drawing = "moestro.repro.amoe.draw"
    setup, figures, claim_rows = SETUP, FIGURES, CLAIMS

    def num_runs(self, load: str) -> int:
        """Runs at rates, and one for all runs with constant numbers of requests of each system."""
        part = self.parts[load]
        num_rates = len(part.rates) + len(part.shares) + bool(part.overload)
        return len(part.systems) * (num_rates * len(part.seeds) + 1)

    def claims(self, findings: AmoeFindings) -> list[Claim]:
        """The paper's claims, in its order."""
        return claims_of(findings)

    def tables(self, findings: AmoeFindings) -> Iterator[RenderableType]:
        """A table for each part and rate, then a line about each system."""
        for load in findings.loads:
            for rate in findings.rates(load):
                table = grid_table(findings, load, rate, self.parts[load].systems, _COLUMNS)
                table.title = f"figure {self.parts[load].figure}, {load}, {rate:g} requests/s"
                yield table
        for name, about in ABOUT.items():
            yield f"{name}: {about}"

    def run(self, load: str, step: Callable[[str], None]) -> AmoeFindings:
        """Run one part."""
        part = self.parts[load]
        findings = AmoeFindings(batch_curve={part.bed.gpu + " " + part.bed.prices: batch_curve(part.bed)})
        for system in part.systems:
            step(f"{load}: {system}, constant numbers of requests")
            findings.closed += _ladder(part).run(system, part.seeds[0])
        self.serve_rates(load, findings, step)
        return findings

    def serve_rates(self, load: str, findings: AmoeFindings, step: Callable[[str], None]) -> None:
        """Run the part at its rates, but for what `findings` has. These have its runs with constant numbers."""
        part = self.parts[load]
        lengths = LENGTHS[part.lengths]
        has = {(cell.load, cell.rate, cell.system, cell.seed) for cell in findings.cells}
        rates = [*part.rates, *(share * _most(findings, load, (ASYNC,)) / lengths.mean_output for share in part.shares)]
        if part.overload:
            most = _most(findings, load, part.systems)
            rates.append(float(f"{part.overload * most / lengths.mean_output:.3g}"))
        for rate in rates:
            for system in part.systems:
                for seed in part.seeds:
                    if (load, rate, system, seed) not in has:
                        step(f"{load} at {rate:g}/s: {system}")
                        findings.cells.append(_cell(part, rate, system, seed, findings))


def make_experiment(settings: ReproSettings) -> AmoeExperiment:
    """The experiment under these settings.

    Raises:
        ConfigError: --loads names one that is not in the plan.
    """
    return AmoeExperiment(chosen_parts(QUICK if settings.quick else WHOLE, settings.loads))


def batch_curve(bed: Bed) -> list[BatchPoint]:
    """Price one expert layer at each batch size (figure 3)."""
    cost = bed.cost()
    return [BatchPoint(size, size / cost.expert_ns(size) * 1e9) for size in _BATCH_SIZES]


def num_in_progress(runs: Sequence[ClosedRun], tokens_per_s: float) -> int:
    """The number of requests at which a system reaches a throughput, between the numbers that were measured.

    Where the system never reaches it, the number is the most that was measured.
    """
    ordered = sorted(runs, key=lambda run: run.num_requests)
    reached = np.maximum.accumulate([run.tokens_per_s for run in ordered])
    at = int(np.searchsorted(reached, tokens_per_s))
    if at == len(ordered):
        return ordered[-1].num_requests
    if at == 0:  # below the smallest number, ITL is the same
        return max(round(ordered[0].num_requests * tokens_per_s / ordered[0].tokens_per_s), 1)
    low, high = ordered[at - 1].num_requests, ordered[at].num_requests
    share = float((tokens_per_s - reached[at - 1]) / (reached[at] - reached[at - 1]))
    return round(low + share * (high - low))


def _ladder(part: Part) -> Ladder:
    timing = part.timing
    return Ladder(
        load=part.name, bed=part.bed, lengths=LENGTHS[part.lengths], numbers=timing.ladder, passes=timing.passes
    )


def _most(findings: AmoeFindings, load: str, systems: Sequence[str]) -> float:
    return max(run.tokens_per_s for run in findings.closed if run.load == load and run.system in systems)


def _cell(part: Part, rate: float, system: str, seed: int, findings: AmoeFindings) -> AmoeCell:
    lengths, timing = LENGTHS[part.lengths], part.timing
    runs = [run for run in findings.closed if (run.load, run.system) == (part.name, system)]
    num_first = 0 if part.is_cold else num_in_progress(runs, rate * lengths.mean_output)
    built = build(system, part.bed, (lengths.mean_context, lengths.longest), seed)
    load = open_load(lengths, rate, timing.stop_s, num_first, seed)
    seen = serve_open(built, load, timing.begin_s, timing.stop_s)
    attention, experts = _item_means(built, seen, timing.stop_s - timing.begin_s)
    return AmoeCell(
        load=part.name, rate=rate, system=system, seed=seed, tokens_per_s=seen.tokens_per_s, itl_ms=seen.itl_ms,
        itl_p99_ms=seen.itl_p99_ms, requests_per_s=seen.requests_per_s, bound=built.bound(),
        stall_shares=seen.stall_shares, num_first=num_first, attention_step=attention, expert_step=experts,
        ended_per_s=seen.ended_per_s,
    )  # fmt: skip


def _item_means(built: Built, seen: Seen, seconds: float) -> tuple[ItemMeans | None, ItemMeans | None]:
    """Mean items of attention workers and of expert workers, from their counts and the workers' times."""
    if built.tallies is None:
        return None, None
    means, busy_s = [], [(1 - share) * seconds for share in seen.stall_shares]
    for tally, spent_s in zip(
        built.tallies, (sum(busy_s[: built.num_seats]), sum(busy_s[built.num_seats :])), strict=True
    ):
        num_items = max(tally.num_items, 1)
        means.append(ItemMeans(tokens=tally.num_tokens / num_items, ms=spent_s / num_items * 1e3))
    return means[0], means[1]
