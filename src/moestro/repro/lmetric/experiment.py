"""LMetric's experiment (arXiv 2603.15202): 16 H20 with Qwen3-30B-A3B, traces and similar sessions, every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from moestro.cost.gpus import gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.errors import ConfigError
from moestro.repro.experiment import Experiment, show_no_step
from moestro.repro.lmetric import LmetricSettings
from moestro.repro.lmetric.adversary import with_hot_prefix
from moestro.repro.lmetric.claims import claims_of
from moestro.repro.lmetric.findings import (
    FIGURES,
    HALF,
    NETWORK,
    OUR_POLICY,
    PAPER_POLICY,
    RIVALS,
    Classes,
    Errors,
    Hotspots,
    LmetricCell,
    LmetricFindings,
    Pair,
)
from moestro.repro.lmetric.predictions import Watched
from moestro.repro.lmetric.prefix_classes import WatchedClasses
from moestro.repro.lmetric.tables import tables_of
from moestro.repro.results import Claim
from moestro.repro.sources import Source, generated_sources, trace_sources
from moestro.repro.testbed import ServingFigures, Testbed, measured, paired_interval, run, saturation_rate, signals_of
from moestro.routing.indicators import batch_size, hit_ratio, num_tokens, p_tokens
from moestro.routing.policy_contract import Needs, RouteInputs, RoutePolicy
from moestro.routing.registry import ROUTE_POLICIES, policy_from
from moestro.routing.scoring import Scored
from moestro.routing.ttft import priced_ttft
from moestro.sim.student_t import student_t_quantile

OTHER_NETWORK, GPU = "qwen2-7b", "h20"
SHARES = (0.3, 0.5, 0.65, 0.8, 0.9)  # shares of the saturation rate; the paper's figures are at one half
WEIGHTS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # Bailian's lambda (Fig. 11)
RANGES = (2, 4, 8, 16, 32)  # AIBrix' filter (Fig. 13)
# No policy was tuned on these sessions. Two of Mooncake's windows were known (docs/repro.md).
UNSEEN_SEEDS = (101, 102, 103, 104, 105)
_FEWEST_SEEDS = 3
_SECOND, _HEATED = "api_agent", "chat"  # the loads of the second network and of the adversary
_NUM_POINTS = 400  # points of Fig. 20
_HITS = Needs(hits=True, figures=("queued_prefill_tokens", "num_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LmetricPlan:
    """The extent of the experiment: loads, rates, policies and seeds.

    Attributes:
        num_requests: number of requests of each load.
        shares: rates, as shares of the saturation rate.
        policies: names of the routing policies.
        paired_shares: rates of the comparison under unseen seeds.
        seeds: unseen seeds. An empty tuple means no comparison.
        sources: names of loads. None means all available ones.
        predicted: the load whose TTFT is predicted; the paper's Fig. 15 and 16 use agents with tools.
    """

    num_requests: int = 2000
    shares: tuple[float, ...] = SHARES
    policies: tuple[str, ...] = ROUTE_POLICIES.names()
    paired_shares: tuple[float, ...] = SHARES
    seeds: tuple[int, ...] = UNSEEN_SEEDS
    sources: tuple[str, ...] | None = None
    predicted: str = "tool_agent"


QUICK = LmetricPlan(
    num_requests=700,
    shares=(HALF, 0.9),
    policies=("round_robin", "vllm-0.26", "bailian", "dynamo", "llm-d", "lmetric", "moestro"),
    seeds=(),
    sources=("chat",),
    predicted="chat",
)


class LmetricExperiment(Experiment[LmetricFindings]):
    """Runs a plan.

    Args:
        plan: loads, rates, policies and seeds.
        traces: directory with Mooncake's traces. None means generated sessions alone.

    Raises:
        ConfigError: the plan names a load that is not available.
    """

    findings_type = LmetricFindings
    drawing = "moestro.repro.lmetric.draw"

    def __init__(self, plan: LmetricPlan, traces: Path | None) -> None:
        self._plan = plan
        self._step: Callable[[str], None] = show_no_step
        sources = generated_sources(plan.num_requests)
        if traces is not None:
            sources = trace_sources(traces, plan.num_requests) + sources
        self.sources = {
            source.name: source for source in sources if plan.sources is None or source.name in plan.sources
        }
        missing = set(plan.sources or ()) - self.sources.keys()
        if missing:
            raise ConfigError(
                f"no load {', '.join(sorted(missing))}: Mooncake's traces are read from --traces DIRECTORY"
            )
        self.findings = LmetricFindings()

    @property
    def loads(self) -> list[str]:
        """The names of the sources."""
        return list(self.sources)

    def plan_of(self, load: str) -> object:
        """The plan, which is the same for every load."""
        del load
        return replace(self._plan, sources=None)

    def claims(self, findings: LmetricFindings) -> list[Claim]:
        """The paper's claims, in its order."""
        return claims_of(findings)

    def tables(self, findings: LmetricFindings) -> Iterator[Table]:
        """A table for each load and rate, then the comparison of `moestro` with its rivals."""
        return tables_of(findings)

    def num_runs(self, load: str) -> int:
        """The number of simulations of one load."""
        source, plan = self.sources[load], self._plan
        paired = len(self._seeds(source)) * len(plan.paired_shares) * len(self._paired_policies())
        sweeps = len(WEIGHTS) + len(RANGES) + len(_INDICATORS) + 1
        second = len(plan.policies) if self._has_second_network(source) else 0
        predicted, heated = 2 * (source.name == plan.predicted), 3 * (source.name == _HEATED)
        return 1 + len(plan.shares) * len(plan.policies) + paired + sweeps + second + predicted + heated

    def run(self, load: str, step: Callable[[str], None]) -> LmetricFindings:
        """Make the findings of one load."""
        source, self._step = self.sources[load], step
        self.findings = LmetricFindings(num_engines=self.bed(source).num_engines, num_requests=self._plan.num_requests)
        self._saturate(source)
        self._compare(source)
        self._sweep(source)
        self._classify(source)
        self._pair(source)
        if self._has_second_network(source):
            self._compare_at_half(source, OTHER_NETWORK)
        if source.name == self._plan.predicted:
            self._predict(source)
        if source.name == _HEATED:
            self._heat(source)
        return self.findings

    # --- what is run

    def bed(self, source: Source, network: str = NETWORK) -> Testbed:
        """The paper's testbed, with the smallest blocks that the source names."""
        return Testbed(network=network_named(network), gpu=gpu_named(GPU), block_size=source.block_size)

    def _paired_policies(self) -> tuple[str, ...]:
        """`moestro` and its rivals, or none where the plan leaves `moestro` out."""
        known = self._plan.policies
        return tuple(name for name in (*RIVALS, OUR_POLICY) if name in known) if OUR_POLICY in known else ()

    def _seeds(self, source: Source) -> tuple[int, ...]:
        """The unseen seeds of a source, or none where there are too few for an interval."""
        seeds = self._plan.seeds[: source.num_unseen]
        return seeds if len(seeds) >= _FEWEST_SEEDS else ()

    def _has_second_network(self, source: Source) -> bool:
        return bool(self._plan.seeds) and source.name == _SECOND

    def _saturate(self, source: Source) -> None:
        self._step(f"{source.name}: saturation")
        policy = policy_from("least_loaded")
        self.findings.saturation[source.name] = saturation_rate(self.bed(source), source.load(1.0, 0), policy)

    def _rate(self, source: Source, share: float) -> float:
        return share * self.findings.saturation[source.name]

    def _once(self, source: Source, share: float, policy: RoutePolicy, name: str, seed: int = 0) -> ServingFigures:
        self._step(f"{source.name} at {share:.0%}: {name}")
        load = source.load(self._rate(source, share), seed)
        return measured(run(self.bed(source), load, policy, signals_of(name, policy), seed))

    def _compare(self, source: Source) -> None:
        """Run every policy at every rate (Fig. 21 to 25)."""
        for share in self._plan.shares:
            for name in self._plan.policies:
                figures = self._once(source, share, _made(name, self.bed(source)), name)
                self.findings.cells.append(self._cell(source, share, name, figures))

    def _cell(self, source: Source, share: float, name: str, figures: ServingFigures, seed: int = 0) -> LmetricCell:
        return LmetricCell(
            load=source.name, is_generated=source.is_generated, network=NETWORK, share=share,
            rate=self._rate(source, share), system=name, seed=seed, measured=figures,
        )  # fmt: skip

    def _compare_at_half(self, source: Source, network: str) -> None:
        """Run a dense network at half of its saturation (second row of Fig. 25)."""
        bed, unit = self.bed(source, network), source.load(1.0, 0)
        rate = HALF * saturation_rate(bed, unit, policy_from("least_loaded"))
        load = source.load(rate, 0)
        for name in self._plan.policies:
            self._step(f"{source.name} with {network}: {name}")
            policy = _made(name, bed)
            figures = measured(run(bed, load, policy, signals_of(name, policy)))
            cell = self._cell(source, HALF, name, figures)
            self.findings.cells.append(msgspec.structs.replace(cell, network=network, rate=rate))

    def _sweep(self, source: Source) -> None:
        """Sweep lambda (Fig. 11), the range (Fig. 13) and the products of indicators (Fig. 18, 19) at half load."""
        found = self.findings
        found.weights[source.name] = [
            (
                weight,
                self._once(source, HALF, policy_from(f"bailian:hit_weight={weight}"), f"lambda {weight:g}"),
            )
            for weight in WEIGHTS
        ]
        found.ranges[source.name] = [
            (most, self._once(source, HALF, policy_from(f"aibrix:max_range={most}"), f"range {most}"))
            for most in RANGES
        ]
        found.indicators[source.name] = {
            name: self._once(source, HALF, policy, name) for name, policy in _INDICATORS.items()
        }

    def _classify(self, source: Source) -> None:
        """Compare the heat of classes with the number of engines that hold them, at half load (Fig. 20)."""
        watched = WatchedClasses(policy_from(PAPER_POLICY))
        self._once(source, HALF, watched, f"{PAPER_POLICY}, its classes")
        shares = watched.sample(_NUM_POINTS)
        self.findings.classes[source.name] = Classes(class_share=shares[0], holder_share=shares[1])

    def _pair(self, source: Source) -> None:
        """Run `moestro` and its rivals under unseen seeds; the best rival of a cell is chosen afterwards."""
        names, seeds = self._paired_policies(), self._seeds(source)
        if not names or not seeds:
            return
        for share in self._plan.paired_shares:
            runs = {
                name: [self._once(source, share, _made(name, self.bed(source)), name, seed) for seed in seeds]
                for name in names
            }
            for name in names:
                for seed, figures in zip(seeds, runs[name], strict=True):
                    self.findings.cells.append(self._cell(source, share, name, figures, seed))
            self.findings.pairs += list(_pairs(source.name, share, runs))

    def _predict(self, source: Source) -> None:
        """Route by the lowest predicted TTFT, predicted for the served network or another (Fig. 15, 16)."""
        bed = self.bed(source)
        for network in (NETWORK, OTHER_NETWORK):
            cost = Roofline(RooflineSettings(network=network_named(network), gpu=bed.gpu))
            predict = priced_ttft(cost.step_ns, bed.max_num_batched_tokens)
            watched = Watched(policy_from("llm-d", inputs=RouteInputs(predict_ttft_ns=predict)))
            figures = self._once(source, HALF, watched, "llm-d")
            errors = watched.relative_errors()
            self.findings.errors.append(
                Errors(
                    is_tuned=network == NETWORK,
                    p50=float(np.percentile(errors, 50)),
                    p90=float(np.percentile(errors, 90)),
                    share_above_20_percent=float((errors > 0.2).mean()),
                    curve=tuple(np.percentile(errors, np.arange(101)).tolist()),
                    measured=figures,
                )
            )

    def _heat(self, source: Source) -> None:
        """Serve a hot prefix with the detector off, filtering, and falling back to load alone (section 5.2)."""
        load = with_hot_prefix(source.load(self._rate(source, HALF), 0), 0)
        for mitigation in ("off", "filter", "load"):
            self._step(f"{load.name}: {mitigation}")
            policy = policy_from(f"{PAPER_POLICY}:hotspots={mitigation}")
            figures = measured(run(self.bed(source), load, policy, signals_of(PAPER_POLICY, policy)))
            first, second = getattr(policy, "num_alarms", (0, 0))
            self.findings.hotspots.append(
                Hotspots(
                    load=load.name, mitigation=mitigation, num_first_alarms=first, num_second_alarms=second,
                    measured=figures,
                )
            )  # fmt: skip


def _made(name: str, bed: Testbed) -> RoutePolicy:
    """A policy by name. A policy that predicts gets the cost model of the served network."""
    inputs = RouteInputs(predict_ttft_ns=priced_ttft(bed.cost().step_ns, bed.max_num_batched_tokens))
    return policy_from(name, inputs=inputs)


# Products of indicators (Fig. 18: P-token against the miss ratio; Fig. 19: the batch against its tokens).
_INDICATORS: dict[str, RoutePolicy] = {
    "P-token * batch": Scored(lambda view: p_tokens(view) * (batch_size(view) + 1), "P-token * batch", _HITS),
    "(1 - hit) * batch": Scored(lambda view: (1 - hit_ratio(view)) * (batch_size(view) + 1), "miss * batch", _HITS),
    "P-token * tokens": Scored(lambda view: p_tokens(view) * (num_tokens(view) + 1), "P-token * tokens", _HITS),
}


def _pairs(load: str, share: float, runs: dict[str, list[ServingFigures]]) -> Iterator[Pair]:
    for figure, of in FIGURES.items():
        values = {name: [of(each) for each in measures] for name, measures in runs.items()}
        other = min((name for name in values if name != OUR_POLICY), key=lambda name: float(np.mean(values[name])))
        mean, low, high = paired_interval(values[OUR_POLICY], values[other], partial(student_t_quantile, 0.975))
        yield Pair(load=load, share=share, figure=figure, other=other, mean=mean, low=low, high=high)


def make_experiment(settings: LmetricSettings) -> LmetricExperiment:
    """The experiment under these settings."""
    plan = QUICK if settings.quick else LmetricPlan()
    sources, num_requests = settings.loads or plan.sources, settings.num_requests or plan.num_requests
    return LmetricExperiment(replace(plan, sources=sources, num_requests=num_requests), settings.traces)
