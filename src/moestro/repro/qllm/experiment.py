"""QLLM's figures 2 to 4 again (arXiv 2503.09304): every engine at every rate, under several seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.repro.lmetric.testbed import LEAD_IN, Latency, latency_ms
from moestro.repro.qllm.engines import ENGINES, make_engine
from moestro.repro.qllm.loads import SHORT_ANSWER, Load, make_rows, offsets_ns
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings
from moestro.sim.arrivals import AtTimes
from moestro.sim.cluster import Cluster
from moestro.sim.results import Results
from moestro.workload.requests import RequestForm, RequestMaker

# The paper's rates. Its answers' lengths are not published: ten tokens, as its authors' repository tells of the version
# that the paper measured, or ShareGPT's own, at which the engine's cost bears 0.2 requests a second.
SHORT = Load(name="ten_tokens", num_requests=400, rates=(1, 3, 5, 7, 10), answer=SHORT_ANSWER)
LONG = Load(name="sharegpt_answers", num_requests=200, rates=(0.1, 0.2, 1, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is run."""

    loads: tuple[Load, ...] = (SHORT, LONG)
    engines: tuple[str, ...] = tuple(ENGINES)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


QUICK = Plan(
    loads=(
        Load(name=SHORT.name, num_requests=150, rates=(1, 4, 7, 10), answer=SHORT_ANSWER),
        Load(name=LONG.name, num_requests=20, rates=(0.1, 1)),
    ),
    seeds=(0,),
)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of one class met with; turnaround: from arrival to the last token."""

    num_requests: int
    ttft_ms: Latency
    turnaround_ms: Latency


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run, without the first LEAD_IN of its requests; throughput is that of all, from first arrival to last end."""

    load: str
    rate: float
    engine: str
    seed: int
    ls: Served
    be: Served
    requests_per_s: float
    tokens_per_s: float


class Findings(msgspec.Struct, kw_only=True):
    """Everything that was run. `kind` is that of the evidence; `lengths` says where those of the requests come from."""

    kind: str = "simulated"
    lengths: str = ""
    cells: list[Cell] = []

    def values(self, load: str, rate: float, engine: str, of: Callable[[Cell], float]) -> NDArray[np.float64]:
        """float64[seeds], a figure of each run; empty: it was not run."""
        cells = self.cells
        return np.array([of(c) for c in cells if (c.load, c.rate, c.engine) == (load, rate, engine)])

    def rates(self, load: str) -> list[float]:
        """Ascending."""
        return sorted({cell.rate for cell in self.cells if cell.load == load})

    @property
    def loads(self) -> list[str]:
        """In the order in which they were run."""
        return list(dict.fromkeys(cell.load for cell in self.cells))


def chosen(plan: Plan, names: tuple[str, ...] | None) -> Plan:
    """The loads of `plan` that have these names; None: all.

    Raises:
        ConfigError: there is none of a name.
    """
    known = {load.name: load for load in plan.loads}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"no load {', '.join(unknown)}; known: {', '.join(known)}")
    return plan if names is None else replace(plan, loads=tuple(known[name] for name in names))


def num_runs(plan: Plan) -> int:
    """Simulations in all."""
    return len(plan.engines) * len(plan.seeds) * sum(len(load.rates) for load in plan.loads)


def reproduce(plan: Plan, trace: Path | None, step: Callable[[str], None]) -> Findings:
    """All of `plan`, one simulation after the other.

    Args:
        trace: see `make_rows`.
        step: called with what begins, for progress bars.

    Raises:
        ConfigError: the trace cannot be used.
    """
    lengths = "generated with ShareGPT's published means" if trace is None else f"drawn from {trace.name}"
    findings = Findings(lengths=lengths)
    for load in plan.loads:
        for seed in plan.seeds:
            maker = RequestMaker(make_rows(load, seed, trace), RequestForm(block_size=16, names_blocks=False))
            for rate in load.rates:
                for engine in plan.engines:
                    step(f"{load.name} at {rate:g}/s: {engine}")
                    results = serve(engine, maker, AtTimes(offsets_ns(load, rate, seed)))
                    findings.cells.append(_cell(results, load=load.name, rate=rate, engine=engine, seed=seed))
    return findings


def serve(engine: str, maker: RequestMaker, arrivals: AtTimes) -> Results:
    """Let the requests come to one engine, and wait until all are answered."""
    router = Router(ROUTE_POLICIES.make("round_robin"), RouterSettings(block_size=maker.form.block_size, seed=0))
    ranks = make_engine(engine)
    num_blocks = ranks.seats[0].rank.scheduler.settings.num_blocks
    router.set_routable(router.add_engine(EngineSpec(num_blocks=num_blocks)), routable=True)
    return Cluster([ranks], router).run(maker, arrivals)


def _cell(results: Results, *, load: str, rate: float, engine: str, seed: int) -> Cell:
    assert results.is_answered.all(), f"not all were answered: {results.refusals}"
    span_s = (int(results.last_token_ns.max()) - int(results.arrival_ns.min())) / NS_PER_S
    is_counted = np.arange(len(results)) >= int(LEAD_IN * len(results))
    return Cell(
        load=load,
        rate=rate,
        engine=engine,
        seed=seed,
        ls=_served(results, is_counted & ~results.is_best_effort),
        be=_served(results, is_counted & results.is_best_effort),
        requests_per_s=len(results) / span_s,
        tokens_per_s=float(results.num_tokens.sum()) / span_s,
    )


def _served(results: Results, rows: NDArray[np.bool_]) -> Served:
    arrival_ns = results.arrival_ns[rows]
    return Served(
        num_requests=int(rows.sum()),
        ttft_ms=latency_ms(results.first_token_ns[rows] - arrival_ns),
        turnaround_ms=latency_ms(results.last_token_ns[rows] - arrival_ns),
    )
