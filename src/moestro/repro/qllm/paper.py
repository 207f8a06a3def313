"""QLLM's set-up (arXiv 2503.09304) as a table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moestro.cost.gpus import A100
from moestro.repro.grid import GridExperiment, PlannedLoad
from moestro.repro.paper_setup import PaperFigure, SetupRow
from moestro.repro.qllm.engines import ENGINES, FCFS, NUM_PLACES, RUN_TO_COMPLETION, SLO_S, WEIGHT_BYTES, make_engine
from moestro.repro.qllm.findings import QllmFindings
from moestro.repro.qllm.loads import WHOLE_ANSWERS, make_rows, offsets_ns

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
