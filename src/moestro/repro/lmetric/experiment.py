"""LMetric's experiment (arXiv 2603.15202): 16 H20 with Qwen3-30B-A3B, traces and similar sessions, 13 policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from rich.table import Table

from moestro.cost.gpus import gpu_named
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.errors import ConfigError
from moestro.repro.experiment import Experiment, show_no_step
from moestro.repro.lmetric import LmetricSettings
from moestro.repro.lmetric.claims import CLAIMS, claims_of
from moestro.repro.lmetric.findings import (
    BASELINE,
    FIGURES,
    HALF,
    NETWORK,
    OTHER_NETWORK,
    OUR_POLICY,
    PAPER_POLICY,
    WEIGHTS,
    Aged,
    Classes,
    Errors,
    Hotspots,
    LmetricCell,
    LmetricFindings,
    Pair,
    Sweep,
    course_of,
    difference,
    tables_of,
)
from moestro.repro.lmetric.paper import FIGURES as PAPER_FIGURES
from moestro.repro.lmetric.paper import SCORED_SEED, SETUP, TUNING_SEED, Source, generated_sources, trace_sources
from moestro.repro.lmetric.rollout import RolledOutTtft, Watched, WatchedClasses, with_hot_prefix
from moestro.repro.results import Claim
from moestro.repro.testbed import (
    ServingFigures,
    Testbed,
    TimedLoad,
    batch_figures,
    measured,
    num_until_full,
    run,
    signals_of,
    sustained_rate,
)
from moestro.routing.policy_contract import Needs, RouteInputs, RoutePolicy
from moestro.routing.registry import policy_from
from moestro.routing.scoring import Scored, batch_size, hit_ratio, num_tokens, p_tokens, priced_ttft
from moestro.sim.results import Results
from moestro.sim.signals import SignalSettings
from moestro.workload.generated.draws import at_rate

GPU = "h20"
SHARES = (HALF, 0.9, 1.2)  # rates as shares of the capacity; most of the paper's figures are at a half
# The paper's systems, ours, and the product of which LMetric's is a variant (Fig. 18).
POLICIES = (BASELINE, "bailian", "dynamo", "llm-d", "miss_ratio", PAPER_POLICY, OUR_POLICY)
OTHERS = ("aibrix", "cache_aware", "llm-d-affinity", "preble", "session_affinity", "vllm-0.27")
NUM_BATCHES = 8  # parts of a run from which intervals follow
# Bailian's lambda (Fig. 11), Dynamo's weight of prompt tokens, and the range of AIBrix' filter (Fig. 12).
TUNED = {
    "bailian": ("hit_weight", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    "dynamo": ("prefill_scale", (0.5, 1, 2, 4, 8, 16, 32, 64, 128)),
    "aibrix": ("max_range", (2, 4, 8, 16, 32)),
}
# The sweep of the figures' age: policies that read figures of engines, and intervals at which figures come: with every
# step (0), as from vLLM's coordinator, and as from `/metrics`.
AGED = (BASELINE, "vllm-0.27", PAPER_POLICY, OUR_POLICY)
PERIODS_MS = (0.0, 100.0, 1000.0)
_CAPABLE = ("bailian", PAPER_POLICY, OUR_POLICY)  # policies whose best steady state is the capacity
_SECOND, _HEATED = "api_agent", "chat"  # the loads of the second network and of the adversary
_NUM_POINTS = 400  # points of Fig. 20
_HITS = Needs(hits=True, figures=("queued_prefill_tokens", "num_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LmetricPlan:
    """The extent of the experiment.

    Attributes:
        num_requests: number of scored requests of each load.
        shares: rates, as shares of the capacity.
        policies: routing policies that run at every rate.
        others: routing policies that run at half of the capacity only.
        sources: names of loads. None means all available ones.
        predicted: loads whose TTFT is predicted; the paper's Fig. 15 has four, its Fig. 16 chats.
        aged_shares: rates of the sweep of the figures' age, as shares of the capacity.
        has_second_network: whether a dense network runs too.
    """

    num_requests: int = 20_000
    shares: tuple[float, ...] = SHARES
    policies: tuple[str, ...] = POLICIES
    others: tuple[str, ...] = OTHERS
    sources: tuple[str, ...] | None = None
    predicted: tuple[str, ...] = ("chat", "api_agent", "coder", "tool_agent")
    aged_shares: tuple[float, ...] = (HALF, 0.9)
    has_second_network: bool = True


QUICK = LmetricPlan(
    num_requests=700, shares=(HALF, 0.9), others=("round_robin",), sources=("chat",), predicted=("chat",),
    aged_shares=(HALF,), has_second_network=False,
)  # fmt: skip


class LmetricExperiment(Experiment[LmetricFindings]):
    """Runs a plan.

    Args:
        plan: loads, rates and policies.
        traces: directory with Mooncake's traces. None means generated sessions alone.

    Raises:
        ConfigError: the plan names a load that is not available.

    Attributes:
        tuned: by policy, the parameter that is tuned and the values that are tried.
    """

    findings_type = LmetricFindings
    drawing = "moestro.repro.lmetric.draw"
    setup, figures, claim_rows = SETUP, PAPER_FIGURES, CLAIMS
    tuned = TUNED

    def __init__(self, plan: LmetricPlan, traces: Path | None) -> None:
        self.plan = plan
        self._step: Callable[[str], None] = show_no_step
        self._tuned: dict[str, str] = {}  # policy -> its text with the tuned parameter
        sources = generated_sources(plan.num_requests)
        if traces is not None:
            sources = trace_sources(traces, plan.num_requests) + sources
        self.sources = {
            source.name: source for source in sources if plan.sources is None or source.name in plan.sources
        }
        missing = set(plan.sources or ()) - self.sources.keys()
        if missing:
            more = "; Mooncake's traces are read from --traces DIRECTORY" if traces is None else ""
            known = ", ".join(source.name for source in sources)
            raise ConfigError(f"no load {', '.join(sorted(missing))}; known: {known}{more}")
        self.findings = LmetricFindings()

    @property
    def loads(self) -> list[str]:
        """The names of the sources."""
        return list(self.sources)

    def plan_of(self, load: str) -> object:
        """The plan, which is the same for every load."""
        del load
        return replace(self.plan, sources=None)

    def claims(self, findings: LmetricFindings) -> list[Claim]:
        """The paper's claims, in its order."""
        return claims_of(findings)

    def tables(self, findings: LmetricFindings) -> Iterator[Table]:
        """A table for each load and rate, then the comparison of `moestro` with its rivals."""
        return tables_of(findings)

    def num_runs(self, load: str) -> int:
        """The number of simulations of one load."""
        plan = self.plan
        sweeps = sum(len(values) for _, values in TUNED.values())
        compared = len(plan.shares) * len(plan.policies) + len(plan.others) + len(WEIGHTS)
        second = len(_CAPABLE) + len(plan.policies) if self._has_second_network(load) else 0
        predicted = 2 * (load in plan.predicted)
        heated = (3 + len(plan.aged_shares) * len(AGED) * len(PERIODS_MS)) * (load == _HEATED)
        return len(_CAPABLE) + sweeps + compared + len(_INDICATORS) + 1 + second + predicted + heated

    def run(self, load: str, step: Callable[[str], None]) -> LmetricFindings:
        """Make the findings of one load."""
        source, self._step = self.sources[load], step
        self._tuned = {}
        self.findings = LmetricFindings(num_engines=self.bed(source).num_engines, num_requests=self.plan.num_requests)
        self.findings.capacity[load] = self._capacity(source, NETWORK)
        self._tune(source)
        self._compare(source, NETWORK, self.plan.shares)
        self._compare_others(source)
        self._weigh(source)
        self._pair(source)
        self._measure_indicators(source)
        self._classify(source)
        if self._has_second_network(load):
            self.findings.capacity[f"{load}, {OTHER_NETWORK}"] = self._capacity(source, OTHER_NETWORK)
            self._compare(source, OTHER_NETWORK, (HALF,))
        if load in self.plan.predicted:
            self._predict(source)
        if load == _HEATED:
            self._age(source)
            self._heat(source)
        return self.findings

    def renew(
        self, load: str, findings: LmetricFindings, systems: Collection[str], step: Callable[[str], None]
    ) -> None:
        """Make the runs of some policies on one load anew, in findings of an earlier run with an equal plan.

        Rates and tuned parameters stay those of the earlier run. Comparisons with the best rival, and the sweep of the
        figures' age, are made again.

        Args:
            findings: findings of all loads, which are changed.
            systems: routing policies without tuned parameters. None of them leaves the sweep of the age alone.
            step: called once for each simulation, with its description.

        Raises:
            ConfigError: a policy has a tuned parameter.
        """
        if tuned := TUNED.keys() & set(systems):
            raise ConfigError(f"{', '.join(sorted(tuned))} is tuned for each load: run the load as a whole")
        source, self.findings, self._step = self.sources[load], findings, step
        kept_courses = {(course.load, course.system): at for at, course in enumerate(findings.courses)}
        for at, cell in enumerate(findings.cells):
            if cell.load == load and cell.system in systems:
                findings.cells[at] = self._cell(source, cell.network, cell.share, cell.system)
        for course in findings.courses[len(kept_courses) :]:
            findings.courses[kept_courses[course.load, course.system]] = course
        del findings.courses[len(kept_courses) :]
        others = [pair for pair in findings.pairs if pair.load != load]
        findings.pairs = []
        self._pair(source)
        by_load = {load: findings.pairs} | {each.load: [p for p in others if p.load == each.load] for each in others}
        findings.pairs = [pair for each in findings.loads for pair in by_load.get(each, ())]
        if load == _HEATED:
            findings.ages.clear()
            self._age(source)

    # --- what is run

    def bed(self, source: Source, network: str = NETWORK) -> Testbed:
        """The paper's testbed, with the smallest blocks that the source names."""
        return Testbed(network=network_named(network), gpu=gpu_named(GPU), block_size=source.block_size)

    def _has_second_network(self, load: str) -> bool:
        return self.plan.has_second_network and load == _SECOND

    def _capacity(self, source: Source, network: str) -> tuple[str, float]:
        """The policy that bears the highest rate, and that rate in requests a second."""
        bed, load = self.bed(source, network), source.load(1.0, SCORED_SEED)
        at_once = replace(load, offsets_ns=np.arange(len(load.rows), dtype=np.int64))
        found: dict[str, float] = {}
        rate = measured(run(bed, at_once, policy_from("least_loaded"), SignalSettings())).requests_per_s
        begin = replace(load, offsets_ns=at_rate(load.offsets_ns, rate))
        for name in _CAPABLE:
            self._step(f"{source.name} with {network}: capacity under {name}")
            found[name] = sustained_rate(bed, begin, partial(self._made, name, bed))
        best = max(found, key=found.__getitem__)
        return best, found[best]

    def _rate(self, source: Source, share: float, network: str = NETWORK) -> float:
        name = source.name if network == NETWORK else f"{source.name}, {network}"
        return share * self.findings.capacity[name][1]

    def _made(self, name: str, bed: Testbed) -> RoutePolicy:
        """A policy by name, with its tuned parameter. A policy that predicts gets prices of the served network."""
        if name == "llm-d":
            return RolledOutTtft(bed.cost().step_ns, bed.max_num_batched_tokens)
        inputs = RouteInputs(predict_ttft_ns=priced_ttft(bed.cost().step_ns, bed.max_num_batched_tokens))
        return policy_from(self._tuned.get(name, name), inputs=inputs)

    def _results(
        self, bed: Testbed, load: TimedLoad, policy: RoutePolicy, period_ms: float | None = None
    ) -> tuple[Results, int]:
        """The results of a run, and the number of requests of its lead-in."""
        return run(bed, load, policy, signals_of(policy, period_ms=period_ms)), num_until_full(bed, load.rows)

    def _at_half(self, source: Source, policy: RoutePolicy, name: str, seed: int = SCORED_SEED) -> ServingFigures:
        self._step(f"{source.name}: {name}")
        return measured(*self._results(self.bed(source), source.load(self._rate(source, HALF), seed), policy))

    def _tune(self, source: Source) -> None:
        """Sweep the parameters of the policies that need tuning, and keep the best (Fig. 9 to 12)."""
        sweeps = self.findings.sweeps[source.name] = {}
        for name, (parameter, values) in TUNED.items():
            found = [
                (value, self._at_half(source, policy_from(text), text, TUNING_SEED))
                for value in values
                for text in [f"{name}:{parameter}={value:g}"]
            ]
            sweeps[name] = Sweep(policy=name, parameter=parameter, values=found)
            self._tuned[name] = f"{name}:{parameter}={sweeps[name].best[0]:g}"

    def _compare(self, source: Source, network: str, shares: tuple[float, ...]) -> None:
        """Run the policies at every rate (Fig. 7, 8 and 21 to 27)."""
        for share in shares:
            for name in self.plan.policies:
                self.findings.cells.append(self._cell(source, network, share, name))

    def _compare_others(self, source: Source) -> None:
        for name in self.plan.others:
            self.findings.cells.append(self._cell(source, NETWORK, HALF, name))

    def _weigh(self, source: Source) -> None:
        """Run Bailian's sum with the paper's weights on the scored requests (Fig. 7 to 10)."""
        for weight in WEIGHTS:
            self.findings.weighed.append(self._cell(source, NETWORK, HALF, f"bailian:hit_weight={weight:g}"))

    def _cell(self, source: Source, network: str, share: float, name: str) -> LmetricCell:
        """One run on the scored requests, and its course at half of the capacity."""
        self._step(f"{source.name} with {network} at {share:.0%}: {name}")
        bed, rate = self.bed(source, network), self._rate(source, share, network)
        results, lead_in = self._results(bed, source.load(rate, SCORED_SEED), self._made(name, bed))
        if share == HALF and network == NETWORK and name not in self.plan.others:
            self.findings.courses.append(course_of(source.name, name, results, lead_in))
        return LmetricCell(
            load=source.name, is_generated=source.is_generated, network=network, share=share, rate=rate, system=name,
            seed=SCORED_SEED, measured=measured(results, lead_in),
            batches=batch_figures(results, lead_in, NUM_BATCHES),
        )  # fmt: skip

    def _pair(self, source: Source) -> None:
        """Compare `moestro` with the best rival of each figure and rate."""
        for share in self.plan.shares:
            by_policy = self.findings.by_policy(source.name, share)
            for figure, of in FIGURES.items():
                rivals = [name for name in by_policy if name != OUR_POLICY]
                other = min(rivals, key=lambda name: of(by_policy[name].measured))
                found = difference(by_policy[OUR_POLICY], by_policy[other], figure)
                self.findings.pairs.append(
                    Pair(load=source.name, share=share, figure=figure, other=other, difference=found)
                )

    def _measure_indicators(self, source: Source) -> None:
        """Run the products of other indicators (Fig. 18, 19)."""
        self.findings.indicators[source.name] = {
            name: self._at_half(source, policy, name) for name, policy in _INDICATORS.items()
        }

    def _classify(self, source: Source) -> None:
        """Compare the heat of classes with the number of engines that hold them (Fig. 20)."""
        watched = WatchedClasses(policy_from(PAPER_POLICY))
        self._at_half(source, watched, f"{PAPER_POLICY}, its classes")
        shares = watched.sample(_NUM_POINTS)
        self.findings.classes[source.name] = Classes(class_share=shares[0], holder_share=shares[1])

    def _predict(self, source: Source) -> None:
        """Route by the lowest TTFT that a roll-out predicts, with the prices of the served network or of another."""
        bed = self.bed(source)
        for network in (NETWORK, OTHER_NETWORK):
            cost = Roofline(RooflineSettings(network=network_named(network), gpu=bed.gpu))
            watched = Watched(RolledOutTtft(cost.step_ns, bed.max_num_batched_tokens))
            figures = self._at_half(source, watched, f"llm-d with prices of {network}")
            errors = watched.relative_errors()
            self.findings.errors.append(
                Errors(
                    load=source.name,
                    is_tuned=network == NETWORK,
                    p50=float(np.percentile(errors, 50)),
                    p90=float(np.percentile(errors, 90)),
                    share_above_20_percent=float((errors > 0.2).mean()),
                    curve=tuple(np.percentile(errors, np.arange(101)).tolist()),
                    measured=figures,
                )
            )

    def _age(self, source: Source) -> None:
        """Route by figures that come at intervals: what the age of figures costs each policy."""
        bed = self.bed(source)
        for share in self.plan.aged_shares:
            load = source.load(self._rate(source, share), SCORED_SEED)
            for name, period_ms in product(AGED, PERIODS_MS):
                self._step(f"{source.name} at {share:.0%}: {name}, figures every {period_ms:g} ms")
                figures = measured(*self._results(bed, load, self._made(name, bed), period_ms or None))
                self.findings.ages.append(
                    Aged(load=load.name, share=share, policy=name, period_ms=period_ms, measured=figures)
                )

    def _heat(self, source: Source) -> None:
        """Serve a hot prefix with the detector off, filtering, and falling back to load alone (section 5.2)."""
        load = with_hot_prefix(source.load(self._rate(source, HALF), SCORED_SEED), 0)
        for mitigation in ("off", "filter", "load"):
            self._step(f"{load.name}: {mitigation}")
            policy = policy_from(f"{PAPER_POLICY}:hotspots={mitigation}")
            figures = measured(run(self.bed(source), load, policy, signals_of(policy)))
            first, second = getattr(policy, "num_alarms", (0, 0))
            self.findings.hotspots.append(
                Hotspots(
                    load=load.name, mitigation=mitigation, num_first_alarms=first, num_second_alarms=second,
                    measured=figures,
                )
            )  # fmt: skip


# Products of indicators (Fig. 18: P-token against the miss ratio; Fig. 19: the batch against its tokens).
_INDICATORS: dict[str, RoutePolicy] = {
    "P-token * batch": Scored(lambda view: p_tokens(view) * (batch_size(view) + 1), "P-token * batch", _HITS),
    "(1 - hit) * batch": Scored(lambda view: (1 - hit_ratio(view)) * (batch_size(view) + 1), "miss * batch", _HITS),
    "P-token * tokens": Scored(lambda view: p_tokens(view) * (num_tokens(view) + 1), "P-token * tokens", _HITS),
}


def make_experiment(settings: LmetricSettings) -> LmetricExperiment:
    """The experiment under these settings."""
    plan = QUICK if settings.quick else LmetricPlan()
    sources, num_requests = settings.loads or plan.sources, settings.num_requests or plan.num_requests
    return LmetricExperiment(replace(plan, sources=sources, num_requests=num_requests), settings.traces)
