"""LMetric's tables again (arXiv 2603.15202): 16 H20 with Qwen3-30B-A3B, traces and sessions like its, every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from moestro.cost.gpus import gpu_named
from moestro.cost.hf_config import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.repro.lmetric.adversary import with_hot_prefix
from moestro.repro.lmetric.loads import Source, generated_sources, trace_sources
from moestro.repro.lmetric.predictions import Watched, predictor
from moestro.repro.lmetric.prefix_classes import WatchedClasses
from moestro.repro.lmetric.testbed import Measured, Testbed, measured, paired_interval, run, saturation_rate, signals_of
from moestro.repro.student_t import student_t_quantile
from moestro.routing.indicators import batch_size, hit_ratio, num_tokens, p_tokens
from moestro.routing.policies.filtered import LowestTtft
from moestro.routing.policy_contract import Needs, RoutePolicy
from moestro.routing.registry import ROUTE_POLICIES, policy_from
from moestro.routing.scoring import Scored

NETWORK, OTHER_NETWORK, GPU = "qwen3-30b-a3b", "qwen2-7b", "h20"
SHARES = (0.3, 0.5, 0.65, 0.8, 0.9)  # of the saturation rate; the paper's figures are at one half
HALF = 0.5
OUR_POLICY, PAPER_POLICY, BASELINE = "moestro", "lmetric", "vllm-0.26"
# Each is the best of some cell at seed 0. They are not all that are: in some the best is one of seven others, beside
# which ours is not compared under more seeds (docs/repro.md).
RIVALS = ("lmetric", "llm-d", "dynamo", "bailian", "llm-d-affinity", "preble")
WEIGHTS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # Bailian's lambda (Fig. 11)
RANGES = (2, 4, 8, 16, 32)  # AIBrix' filter (Fig. 13)
# Under which no policy was looked at while it was made; of Mooncake's windows that cannot be said (docs/repro.md).
UNSEEN_SEEDS = (101, 102, 103, 104, 105)
_FEWEST_SEEDS = 3
_SECOND, _HEATED = "api_agent", "chat"  # the loads of the second network, and of the adversary
_NUM_POINTS = 400  # of Fig. 20
_HITS = Needs(hits=True, figures=("queued_prefill_tokens", "num_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is run.

    Attributes:
        num_requests: of each load.
        shares: of the saturation rate.
        policies: by name.
        paired_shares, seeds: of the comparison under unseen seeds; no seeds: none.
        sources: names of loads; None: all that are at hand.
        predicted: the load whose TTFT is predicted; the paper's Fig. 15 and 16 are of its agents with tools.
    """

    num_requests: int = 2000
    shares: tuple[float, ...] = SHARES
    policies: tuple[str, ...] = ROUTE_POLICIES.names()
    paired_shares: tuple[float, ...] = SHARES
    seeds: tuple[int, ...] = UNSEEN_SEEDS
    sources: tuple[str, ...] | None = None
    predicted: str = "tool_agent"


QUICK = Plan(
    num_requests=700,
    shares=(HALF, 0.9),
    policies=("round_robin", "vllm-0.26", "bailian", "dynamo", "llm-d", "lmetric", "moestro"),
    seeds=(),
    sources=("chat",),
    predicted="chat",
)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run, and of what."""

    load: str
    is_generated: bool
    network: str
    share: float
    rate: float
    policy: str
    seed: int
    measured: Measured


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Ours beside the best rival of a cell, over unseen seeds: the relative difference and its 95 % interval."""

    load: str
    share: float
    figure: str
    other: str
    mean: float  # below 0: ours is less
    low: float
    high: float

    @property
    def verdict(self) -> Literal["better", "undecided", "worse"]:
        """Where the interval lies; undecided: it includes 0, which does not say that both are alike."""
        return "worse" if self.low > 0 else "better" if self.high < 0 else "undecided"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """How far predictions of TTFT were off, and what they did to the policy that goes by them."""

    is_tuned: bool
    p50: float
    p90: float
    share_above_20_percent: float
    curve: tuple[float, ...]  # of relative error, at each percentile
    measured: Measured


class Hotspots(msgspec.Struct, frozen=True, kw_only=True):
    """What the detector saw and did."""

    load: str
    mitigation: str
    num_first_alarms: int
    num_second_alarms: int
    measured: Measured


class Classes(msgspec.Struct, frozen=True, kw_only=True):
    """Of requests whose prefix class was tracked: its share of the window x, and that of the engines which hold it."""

    class_share: tuple[float, ...]
    holder_share: tuple[float, ...]

    @property
    def benign(self) -> float:
        """Of these requests, how many keep x / (1 - x) <= |M| / (the other engines): equation 2."""
        return float((np.asarray(self.class_share) <= np.asarray(self.holder_share)).mean())


class Findings(msgspec.Struct, kw_only=True):
    """Everything that was run. `kind` is that of the evidence."""

    kind: str = "simulated"
    num_engines: int = 0
    num_requests: int = 0
    saturation: dict[str, float] = {}
    cells: list[Cell] = []
    pairs: list[Pair] = []
    weights: dict[str, list[tuple[float, Measured]]] = {}  # by load: lambda
    ranges: dict[str, list[tuple[int, Measured]]] = {}
    indicators: dict[str, dict[str, Measured]] = {}  # by load, by score
    errors: list[Errors] = []
    classes: dict[str, Classes] = {}  # by load
    hotspots: list[Hotspots] = []


def merged(parts: Sequence[Findings]) -> Findings:
    """Findings of several loads as one; there is at least one."""
    whole = msgspec.structs.replace(parts[0])
    for part in parts[1:]:
        for field in msgspec.structs.fields(Findings):
            ours, theirs = getattr(whole, field.name), getattr(part, field.name)
            if isinstance(ours, list):
                setattr(whole, field.name, ours + theirs)
            elif isinstance(ours, dict):
                setattr(whole, field.name, ours | theirs)
    return whole


class Reproduction:
    """Runs a plan, one simulation after the other.

    Args:
        plan: see there.
        traces: a directory with Mooncake's traces; None: generated sessions alone.
        step: called with what begins, for progress bars.
    """

    def __init__(self, plan: Plan, traces: Path | None, step: Callable[[str], None]) -> None:
        self._plan = plan
        self._step = step
        sources = generated_sources(plan.num_requests)
        if traces is not None:
            sources = trace_sources(traces, plan.num_requests) + sources
        self.sources = [source for source in sources if plan.sources is None or source.name in plan.sources]
        self.findings = Findings()

    def num_runs(self, source: Source) -> int:
        """Simulations of one load."""
        plan = self._plan
        paired = len(self._seeds(source)) * len(plan.paired_shares) * len(self._paired_policies())
        sweeps = len(WEIGHTS) + len(RANGES) + len(_INDICATORS) + 1
        second = len(plan.policies) if self._has_second_network(source) else 0
        predicted, heated = 2 * (source.name == plan.predicted), 3 * (source.name == _HEATED)
        return 1 + len(plan.shares) * len(plan.policies) + paired + sweeps + second + predicted + heated

    def run(self, source: Source) -> Findings:
        """All of one load."""
        self.findings = Findings(num_engines=self.bed(source).num_engines, num_requests=self._plan.num_requests)
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
        """The paper's, with blocks as fine as the source tells them."""
        return Testbed(network=network_named(network), gpu=gpu_named(GPU), block_size=source.block_size)

    def _paired_policies(self) -> tuple[str, ...]:
        """Ours and its rivals, or none where ours is not to be run."""
        known = self._plan.policies
        return tuple(name for name in (*RIVALS, OUR_POLICY) if name in known) if OUR_POLICY in known else ()

    def _seeds(self, source: Source) -> tuple[int, ...]:
        """For pairs; too few say nothing, and none are run."""
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

    def _once(self, source: Source, share: float, policy: RoutePolicy, name: str, seed: int = 0) -> Measured:
        self._step(f"{source.name} at {share:.0%}: {name}")
        load = source.load(self._rate(source, share), seed)
        return measured(run(self.bed(source), load, policy, signals_of(name, policy), seed))

    def _compare(self, source: Source) -> None:
        """Fig. 21 to 25: every policy at every rate."""
        for share in self._plan.shares:
            for name in self._plan.policies:
                figures = self._once(source, share, _made(name, self.bed(source)), name)
                self.findings.cells.append(self._cell(source, share, name, figures))

    def _cell(self, source: Source, share: float, name: str, figures: Measured, seed: int = 0) -> Cell:
        return Cell(
            load=source.name, is_generated=source.is_generated, network=NETWORK, share=share,
            rate=self._rate(source, share), policy=name, seed=seed, measured=figures,
        )  # fmt: skip

    def _compare_at_half(self, source: Source, network: str) -> None:
        """The second row of Fig. 25: a dense network, at half of what it can bear."""
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
        """Fig. 11 (lambda), Fig. 13 (range), Fig. 18 and 19 (which indicators to multiply), at half the load."""
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
        """Fig. 20: how hot classes are, against how many engines hold them, at half the load."""
        watched = WatchedClasses(policy_from(PAPER_POLICY))
        self._once(source, HALF, watched, f"{PAPER_POLICY}, its classes")
        shares = watched.sample(_NUM_POINTS)
        self.findings.classes[source.name] = Classes(class_share=shares[0], holder_share=shares[1])

    def _pair(self, source: Source) -> None:
        """Ours beside the others under unseen seeds; the best other of a cell is chosen afterwards, against us."""
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
        """Fig. 15 and 16: the lowest predicted TTFT, predicted for the network served, or for another."""
        bed = self.bed(source)
        for network in (NETWORK, OTHER_NETWORK):
            cost = Roofline(RooflineSettings(network=network_named(network), gpu=bed.gpu))
            watched = Watched(LowestTtft(predict_ttft_ns=predictor(cost, bed.max_num_batched_tokens)))
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
        """Section 5.2: a hot prefix, with the detector off, filtering, and falling back to load alone."""
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
    """A policy by name; the one that predicts is given the cost model of what is served."""
    if name != "llm-d":
        return policy_from(name)
    return LowestTtft(predict_ttft_ns=predictor(bed.cost(), bed.max_num_batched_tokens))


# What could be multiplied by what (Fig. 18: P-token against the miss ratio; Fig. 19: the batch against its tokens).
_INDICATORS: dict[str, RoutePolicy] = {
    "P-token * batch": Scored(lambda view: p_tokens(view) * (batch_size(view) + 1), "P-token * batch", _HITS),
    "(1 - hit) * batch": Scored(lambda view: (1 - hit_ratio(view)) * (batch_size(view) + 1), "miss * batch", _HITS),
    "P-token * tokens": Scored(lambda view: p_tokens(view) * (num_tokens(view) + 1), "P-token * tokens", _HITS),
}
FIGURES: dict[str, Callable[[Measured], float]] = {
    "TTFT mean": lambda figures: figures.ttft_ms.mean,
    "TTFT P99": lambda figures: figures.ttft_ms.p99,
    "TPOT mean": lambda figures: figures.tpot_ms.mean,
    "TPOT P99": lambda figures: figures.tpot_ms.p99,
}


def _pairs(load: str, share: float, runs: dict[str, list[Measured]]) -> Iterator[Pair]:
    for figure, of in FIGURES.items():
        values = {name: [of(each) for each in measures] for name, measures in runs.items()}
        other = min((name for name in values if name != OUR_POLICY), key=lambda name: float(np.mean(values[name])))
        mean, low, high = paired_interval(values[OUR_POLICY], values[other], partial(student_t_quantile, 0.975))
        yield Pair(load=load, share=share, figure=figure, other=other, mean=mean, low=low, high=high)
