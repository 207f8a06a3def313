"""QLLM's set-up (arXiv 2503.09304) as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from rich.table import Table

from moestro.cost.gpus import A100
from moestro.repro.experiment import GridExperiment, PaperFigure, PlannedLoad, SetupRow
from moestro.repro.qllm.loads import (
    ENGINES,
    EXPERT,
    FCFS,
    NUM_PLACES,
    PAPER_RATES,
    RUN_TO_COMPLETION,
    SLO_S,
    WEIGHT_BYTES,
    WHOLE_ANSWERS,
    make_engine,
    make_rows,
    offsets_ns,
)
from moestro.repro.results import Cell, Findings
from moestro.repro.testbed import Latency

# The findings of QLLM's experiment.


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the requests of one class; turnaround is the time from arrival to the last token."""

    num_requests: int
    ttft_ms: Latency
    turnaround_ms: Latency


class QllmCell(Cell, frozen=True, kw_only=True):
    """One run, without the first LEAD_IN of its requests. Throughput counts all, from first arrival to last end.

    Attributes:
        system: engine.
        ls: latency-sensitive requests.
        be: best-effort requests.
    """

    system: str = msgspec.field(name="engine")
    ls: ClassFigures
    be: ClassFigures
    requests_per_s: float
    tokens_per_s: float


class QllmFindings(Findings[QllmCell], kw_only=True):
    """All runs. `lengths` says where the requests' lengths come from."""

    lengths: str = ""


Figure = Callable[[QllmCell], float]


def ls_ttft(cell: QllmCell) -> float:
    """Return the mean TTFT of latency-sensitive requests, ms."""
    return cell.ls.ttft_ms.mean


def ls_ttft_p99(cell: QllmCell) -> float:
    """Return the 99th percentile of TTFT of latency-sensitive requests, ms."""
    return cell.ls.ttft_ms.p99


def be_ttft(cell: QllmCell) -> float:
    """Return the mean TTFT of best-effort requests, ms."""
    return cell.be.ttft_ms.mean


def ls_turnaround(cell: QllmCell) -> float:
    """Return the mean turnaround of latency-sensitive requests, ms."""
    return cell.ls.turnaround_ms.mean


def be_turnaround(cell: QllmCell) -> float:
    """Return the mean turnaround of best-effort requests, ms."""
    return cell.be.turnaround_ms.mean


def throughput(cell: QllmCell) -> float:
    """Return the throughput, requests a second."""
    return cell.requests_per_s


def num_answer_tokens(cell: QllmCell) -> float:
    """Return the mean length of the answers, tokens."""
    return cell.tokens_per_s / cell.requests_per_s


_Experiment = GridExperiment[QllmFindings]

_DRAWN = PlannedLoad(name=WHOLE_ANSWERS, num_requests=50_000, rates=(1.0,))  # requests from which shares are read


def _share_of_ls(_: _Experiment) -> float:
    """Share of latency-sensitive requests among those that are drawn."""
    is_ls = make_rows(_DRAWN, 0, None).is_ls
    assert is_ls is not None, "requests have classes"
    return round(float(is_ls.mean()), 2)


def _variation_of_gaps(_: _Experiment) -> float:
    """Coefficient of variation of the times between arrivals; 1 for a Poisson process."""
    gaps = np.diff(offsets_ns(_DRAWN, 1.0, 0))
    return round(float(gaps.std() / gaps.mean()), 1)


def _longest_answers(experiment: _Experiment) -> tuple[int, ...]:
    loads = [replace(_DRAWN, name=load.name) for load in experiment.plan.loads]
    return tuple(int(make_rows(load, 0, None).num_output_tokens.max()) for load in loads)


def _places(name: str) -> int:
    return make_engine(name).seats[0].rank.scheduler.settings.max_num_seqs


SETUP = (
    SetupRow(
        what="share of latency-sensitive requests",
        where="section 4, Workload",
        quote="marks 20% of these prompts as LS prompts",
        value=0.2,
        ours=_share_of_ls,
    ),
    SetupRow(
        what="arrivals: coefficient of variation of the gaps",
        where="section 4, Workload",
        quote="in accordance with Poisson arrival rates",
        value=1.0,
        ours=_variation_of_gaps,
    ),
    SetupRow(
        what="sequences of a batch of the baseline, in both readings",
        where="section 4, Baseline System",
        quote="We set the maximum batch size to 32",
        value=(32, 32),
        ours=lambda _: (_places(RUN_TO_COMPLETION), _places(FCFS)),
    ),
    SetupRow(
        what="sequences that hold KV in QLLM's engines",
        where="",
        quote="",
        value=64,
        ours=lambda _: NUM_PLACES,
        differs="the paper states no number: a batch, and as many that are preempted",
    ),
    SetupRow(
        what="GPU",
        where="section 4, Experimental Setup",
        quote="an Nvidia A100 GPU (80 GB memory)",
        value="a100-80g",
        ours=lambda _: A100.name,
    ),
    SetupRow(
        what="weights, bytes",
        where="section 4, Models and Dataset",
        quote="the model required approximately 22.93 GB of GPU memory",
        value=22.93e9,
        ours=lambda _: WEIGHT_BYTES,
    ),
    SetupRow(
        what="objective of TTFT, s",
        where="section 4, Q1",
        quote="We set the SLO to 3 seconds",
        value=3.0,
        ours=lambda _: SLO_S,
    ),
    SetupRow(
        what="requests a second",
        where="abstract",
        quote="enabling SLO compliance for up to 7 jobs per second",
        value={(1, 3, 5, 7), (1, 3, 5, 7, 10)},
        ours=lambda experiment: {load.rates for load in experiment.plan.loads},
        differs="the paper's rates stand in pictures; 10 is an overload, which no claim is judged by",
    ),
    SetupRow(
        what="length of answers, tokens, at most",
        where="",
        quote="",
        value=(10, 20, 40, 60, 80, 120, 240, 1024),
        ours=_longest_answers,
        differs="the paper does not state it, so it is swept",
    ),
    SetupRow(
        what="engines",
        where="section 4, Q1; sections 2.3, 3.2",
        quote="HF TGI employs a run-to-completion strategy",
        value=True,
        ours=lambda experiment: {RUN_TO_COMPLETION, FCFS} <= set(ENGINES) & set(experiment.plan.systems),
    ),
)

_LOST = ""  # the figure is lost from every text of the paper; pictures and the published abstract have it


def _figure(what: str, where: str, value: float, least: float, quote: str = _LOST) -> PaperFigure:
    return PaperFigure(what=what, where=where, quote=quote, value=value, least=least)


EQUAL = 0.03  # throughputs that differ by less count as equal
MEAN_FACTOR = _figure("TTFT of LS of the baseline over QLLM's, on average", "abstract", 65.5, 65.5)
MOST_FACTOR = _figure("the same, at most", "abstract", 101.6, 101.6)
TURNAROUND_FACTOR = _figure("turnaround of LS of the baseline over QLLM's, at most", "contributions", 12.8, 12.8)
HELD_UP_TO = _figure(
    "requests a second up to which the objective is met", "abstract", 7.0, 7.0,
    "enabling SLO compliance for up to 7 jobs per second",
)  # fmt: skip
COMPARABLE = _figure("throughput over the baseline's: comparable or slightly higher", "Fig. 3", 1.0, 1 - EQUAL)
FIGURES = (MEAN_FACTOR, MOST_FACTOR, TURNAROUND_FACTOR, HELD_UP_TO, COMPARABLE)


# What the paper states, beside what was found with each length of answers.

# The paper's text has two baselines: Q1 says that TGI runs batches to completion; sections 2.3 and 3.2 and Fig. 1a
# describe continuous batching.
READINGS = {RUN_TO_COMPLETION: "run-to-completion (Q1)", FCFS: "continuous batching (2.3, 3.2, Fig. 1a)"}


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The paper's figures with one length of answers and one baseline, each by rate and a mean over seeds.

    Attributes:
        load: the load.
        baseline: engine of the baseline, one of READINGS.
        num_answer_tokens: mean length of its answers, tokens.
        is_judged: whether it was run at all of the paper's rates.
        ttft: TTFT of LS of the baseline over that of QLLM.
        turnaround: turnaround of LS, likewise.
        throughput: throughput of QLLM over that of the baseline.
        held: rates at which QLLM's mean TTFT of LS meets the objective.
        held_by_baseline: rates at which the baseline's does.
    """

    load: str
    baseline: str
    num_answer_tokens: float
    is_judged: bool
    ttft: dict[float, float]
    turnaround: dict[float, float]
    throughput: dict[float, float]
    held: list[float]
    held_by_baseline: list[float]

    @property
    def mean_factor(self) -> float:
        """Mean of `ttft` over the rates."""
        return sum(self.ttft.values()) / len(self.ttft)

    @property
    def has_figure_2(self) -> bool:
        """Whether QLLM meets the objective at every rate of the point, and the baseline at none."""
        return set(self.held) == set(self.ttft) and not self.held_by_baseline

    @property
    def has_mean_factor(self) -> bool:
        """Whether the factor on average is the paper's or more."""
        return MEAN_FACTOR.is_reached(self.mean_factor)


def ratios(
    findings: QllmFindings, load: str, engines: tuple[str, str], of: Figure, rates: list[float] | None = None
) -> dict[float, float]:
    """The first engine's figure over the second's by rate, each the mean over seeds.

    Args:
        rates: rates at which the load was run. None means the paper's.
    """
    first, second = engines
    return {
        rate: float(findings.values(load, rate, first, of).mean() / findings.values(load, rate, second, of).mean())
        for rate in (paper_rates(findings, load) if rates is None else rates)
    }


def paper_rates(findings: QllmFindings, load: str) -> list[float]:
    """The paper's rates at which a load was run; all of its rates if there is none."""
    rates = findings.rates(load)
    return [rate for rate in rates if rate in PAPER_RATES] or rates


def sweep_point(findings: QllmFindings, load: str, baseline: str = RUN_TO_COMPLETION) -> SweepPoint:
    """Compare QLLM with a reading of the paper's baseline on a load."""
    compared = (baseline, EXPERT)
    return SweepPoint(
        load=load,
        baseline=baseline,
        num_answer_tokens=float(findings.values(load, findings.rates(load)[0], EXPERT, num_answer_tokens).mean()),
        is_judged=set(PAPER_RATES) <= set(findings.rates(load)),
        ttft=ratios(findings, load, compared, ls_ttft),
        turnaround=ratios(findings, load, compared, ls_turnaround),
        throughput=ratios(findings, load, (EXPERT, baseline), throughput),
        held=_held(findings, load, EXPERT),
        held_by_baseline=_held(findings, load, baseline),
    )


def _held(findings: QllmFindings, load: str, engine: str) -> list[float]:
    rates = paper_rates(findings, load)
    return [rate for rate in rates if findings.values(load, rate, engine, ls_ttft).mean() <= SLO_S * 1e3]


def sweep_table(points: list[SweepPoint]) -> Table:
    """The paper's figures over the length of answers."""
    table = Table(
        "load", "tokens an answer", "TTFT of LS, x lower", "QLLM holds 3 s", "baseline holds 3 s", "throughput",
        "LS turnaround, x lower", title="The paper's figures over the length of answers, which it does not state",
        caption="simulated; QLLM beside run_to_completion, one reading of the paper's baseline, at its rates; means"
        " over seeds",
    )  # fmt: skip
    table.add_row("the paper", "?", f"{MEAN_FACTOR.value:g} on average, up to {MOST_FACTOR.value:g}",
                  f"up to {HELD_UP_TO.value:g}/s", "at no rate", "comparable or slightly higher",
                  f"up to {TURNAROUND_FACTOR.value:g}", end_section=True)  # fmt: skip
    for point in points:
        table.add_row(
            point.load,
            f"{point.num_answer_tokens:.0f}",
            f"{point.mean_factor:.1f} on average, up to {max(point.ttft.values()):.1f}",
            at_rates(point.held),
            at_rates(point.held_by_baseline),
            f"{min(point.throughput.values()) - 1:+.0%} to {max(point.throughput.values()) - 1:+.0%}",
            f"{min(point.turnaround.values()):.1f} to {max(point.turnaround.values()):.1f}",
        )
    return table


def at_rates(rates: list[float]) -> str:
    """Write rates in words."""
    return f"at {', '.join(f'{rate:g}' for rate in rates)}/s" if rates else "at no rate"
