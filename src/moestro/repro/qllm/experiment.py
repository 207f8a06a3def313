"""QLLM's experiment (arXiv 2503.09304, figures 2 to 4): every engine at every rate, under several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from moestro.core.clock import NS_PER_S
from moestro.repro.experiment import GridExperiment, GridPlan, Line, Panel, PlannedLoad, plan_for
from moestro.repro.qllm import QllmSettings
from moestro.repro.qllm.claims import CLAIMS, claims_of
from moestro.repro.qllm.loads import (
    ANSWER_LIMITS,
    ENGINES,
    EXPERT,
    EXPERT_AGED,
    EXPERT_MIXED,
    FCFS,
    FCFS_64,
    ITERATION,
    ITERATION_AGED,
    ITERATION_MIXED,
    MIDDLE,
    PAPER_RATES,
    RUN_TO_COMPLETION,
    SHORT,
    SLO_S,
    make_engine,
    make_rows,
    offsets_ns,
    planned,
)
from moestro.repro.qllm.paper import (
    FIGURES,
    SETUP,
    ClassFigures,
    QllmCell,
    QllmFindings,
    be_ttft,
    be_turnaround,
    ls_ttft,
    ls_ttft_p99,
    ls_turnaround,
    sweep_point,
    sweep_table,
    throughput,
)
from moestro.repro.results import Claim, Column
from moestro.repro.testbed import LEAD_IN, latency_ms
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.results import Results
from moestro.workload.rows import RequestForm, RequestMaker

WHOLE = GridPlan(loads=tuple(map(planned, ANSWER_LIMITS)), systems=tuple(ENGINES), seeds=(0, 1, 2))
QUICK = GridPlan(
    loads=(
        PlannedLoad(name=SHORT, num_requests=150, rates=PAPER_RATES),
        PlannedLoad(name=MIDDLE, num_requests=80, rates=PAPER_RATES),
    ),
    systems=(RUN_TO_COMPLETION, FCFS, FCFS_64, ITERATION, EXPERT),
    seeds=(0,),
)
# Dashed lines share the colour of the engine that they differ from by ageing, preemption or number of places.
_LINES = {
    RUN_TO_COMPLETION: Line("run to completion (the paper's baseline)", "C7", "-"),
    FCFS: Line("continuous batching, first come first served", "C0", "-"),
    FCFS_64: Line("... with 64 places, as all below", "C0", "--"),
    ITERATION: Line("priority between iterations (Algorithm 1)", "C1", "-"),
    ITERATION_AGED: Line("... with ageing", "C1", "--"),
    EXPERT: Line("QLLM: preemption at every expert call", "C3", "-"),
    EXPERT_AGED: Line("... with ageing", "C3", "--"),
    ITERATION_MIXED: Line("LS first between iterations, mixed batches", "C2", "--"),
    EXPERT_MIXED: Line("preemption at every expert call, mixed batches (ours)", "C2", "-"),
}


class QllmExperiment(GridExperiment[QllmFindings]):
    """Runs a plan.

    Args:
        plan: loads, rates, engines and seeds.
        trace: file of request lengths. None means generated lengths.
    """

    findings_type = QllmFindings
    drawing = "moestro.repro.qllm.draw"
    setup, figures, claim_rows = SETUP, FIGURES, CLAIMS
    columns = (
        Column("LS TTFT, s", ls_ttft, 1e3),
        Column("P99", ls_ttft_p99, 1e3),
        Column("LS turnaround, s", ls_turnaround, 1e3),
        Column("BE TTFT, s", be_ttft, 1e3),
        Column("BE turnaround, s", be_turnaround, 1e3),
        Column("requests/s", throughput),
    )
    panels = (
        Panel("time to first token, latency-sensitive, s", ls_ttft, 1e3, is_log=True, objective=SLO_S),
        Panel("turnaround, latency-sensitive, s", ls_turnaround, 1e3, is_log=True),
        Panel("turnaround, best effort, s", be_turnaround, 1e3, is_log=True),
        Panel("requests answered a second", throughput),
    )
    lines = _LINES
    caption = "QLLM's cost (Mixtral 8x7B, 4 bits, A100), simulated"

    def __init__(self, plan: GridPlan, trace: Path | None) -> None:
        super().__init__(plan)
        self._trace = trace

    def plan_of(self, load: str) -> object:
        """The plan with this load alone, and the trace."""
        return super().plan_of(load), None if self._trace is None else str(self._trace)

    def empty_findings(self) -> QllmFindings:
        """Return findings without runs, which name the origin of the lengths."""
        return QllmFindings(
            lengths="generated with ShareGPT's published means"
            if self._trace is None
            else f"drawn from {self._trace.name}"
        )

    def served(self, load: PlannedLoad, seed: int) -> Callable[[float, str], QllmCell]:
        """Make the requests of a load; the function returned lets one engine serve them."""
        maker = RequestMaker(make_rows(load, seed, self._trace), RequestForm(block_size=16, names_blocks=False))

        def cell(rate: float, engine: str) -> QllmCell:
            results = serve(engine, maker, AtTimes(offsets_ns(load, rate, seed)))
            return _cell(results, load=load.name, rate=rate, system=engine, seed=seed)

        return cell

    def claims(self, findings: QllmFindings) -> list[Claim]:
        """The paper's claims, in its order, for each load; then ours."""
        return claims_of(findings)

    def table_title(self, findings: QllmFindings, load: str, rate: float) -> str:
        """The load, the rate, and the origin of the lengths."""
        return f"{super().table_title(findings, load, rate)}; lengths {findings.lengths}"

    def tables(self, findings: QllmFindings) -> Iterator[RenderableType]:
        """A table for each load and rate, a line about each engine, then the paper's figures over the lengths."""
        yield from super().tables(findings)
        for name, engine in ENGINES.items():
            yield f"{name}: {engine.about}"
        yield sweep_table([sweep_point(findings, load) for load in findings.loads])


def make_experiment(settings: QllmSettings) -> QllmExperiment:
    """The experiment under these settings."""
    plan = plan_for(settings, WHOLE, QUICK)
    if settings.num_requests is not None:
        plan = replace(plan, loads=tuple(replace(load, num_requests=settings.num_requests) for load in plan.loads))
    return QllmExperiment(plan, settings.trace)


def serve(engine: str, maker: RequestMaker, arrivals: AtTimes) -> Results:
    """Serve requests by one engine until all are answered."""
    router = Router(ROUTE_POLICIES.make("round_robin"), RouterSettings(block_size=maker.form.block_size, seed=0))
    ranks = make_engine(engine)
    num_blocks = ranks.seats[0].rank.scheduler.settings.num_blocks
    router.set_routable(router.add_engine(EngineSpec(num_blocks=num_blocks)), routable=True)
    return Cluster([ranks], router).run(maker, arrivals)


def _cell(results: Results, *, load: str, rate: float, system: str, seed: int) -> QllmCell:
    assert results.is_answered.all(), f"not all were answered: {results.refusals}"
    span_s = (int(results.last_token_ns.max()) - int(results.arrival_ns.min())) / NS_PER_S
    is_counted = np.arange(len(results)) >= int(LEAD_IN * len(results))
    return QllmCell(
        load=load,
        rate=rate,
        system=system,
        seed=seed,
        ls=_served(results, is_counted & ~results.is_best_effort),
        be=_served(results, is_counted & results.is_best_effort),
        requests_per_s=len(results) / span_s,
        tokens_per_s=float(results.num_tokens.sum()) / span_s,
    )


def _served(results: Results, rows: NDArray[np.bool_]) -> ClassFigures:
    arrival_ns = results.arrival_ns[rows]
    return ClassFigures(
        num_requests=int(rows.sum()),
        ttft_ms=latency_ms(results.first_token_ns[rows] - arrival_ns),
        turnaround_ms=latency_ms(results.last_token_ns[rows] - arrival_ns),
    )
