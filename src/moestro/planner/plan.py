"""The search of `moestro plan`, and its answer: what wins, by how much, and the figures behind it.

Estimates order and cut the deployments. Simulations of the rest find the best within the objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

import msgspec
import numpy as np

from moestro import __version__
from moestro.core.rng import student_t_quantile
from moestro.cost.gpus import WORKSPACE_BYTES
from moestro.cost.roofline import VLLM_HOST
from moestro.planner.divisions import (
    GpuDivision,
    HostMemoryAnswer,
    MemoryUse,
    divisions_of,
    fewest_gpus,
    memory_of,
    why_not_served,
)
from moestro.planner.question import PlanQuestion
from moestro.planner.settings import ObjectiveSettings, unnamed_notes
from moestro.planner.simulated import (
    Curve,
    EstimatedPoint,
    Estimator,
    FittingDivision,
    OperatingPoint,
    SimulatedPoint,
    excess,
)
from moestro.planner.systems import STEP_POLICY, RunLimits, ServerLaunch, memory_share, own_servers

# A deployment is left out if its estimate, times this, is below a simulated throughput. The largest quotients of the
# two were 1.05 in lock-step, in 219 runs, and 0.77 in `async`, in 11 (bench/simulator/plan_estimates.py).
ALLOWANCE, ASYNC_ALLOWANCE = 1.15, 0.9
_NUM_RUNGS = 6  # estimates per factor of 8 in the number of requests; curves are smooth
# A bracket around the objective: numbers of requests that differ by less give nearly the same throughput. Runs of
# `async` take a hundred times as long.
_BRACKET, _ASYNC_BRACKET = 1.2, 1.6
_MOST_STEPS = 8
# `async` had about half of its estimate in these trials; a first run far beyond it takes a minute.
_ASYNC_SHARE = 0.5
_COMPARISON_SHARE = 0.4  # of the time, kept for the comparison under several seeds
_LOWER_POINTS = (0.5, 0.2, 0.05)  # shares of the best number of requests at which the curves of the best are completed
_SHOWN_CURVES = 4


@dataclass(slots=True, eq=False)
class SearchFindings:
    """Everything that the search found.

    Attributes:
        memory: memory of each deployment, in the order in which they were listed.
        curves: deployments that fit, by estimate, the best first.
        left_out: deployments that were not simulated because their estimate is below `best_tokens_per_s`.
        not_reached: deployments for which the time did not suffice.
        pairs: throughput of the best two at the same numbers of requests, by seed.
    """

    memory: dict[GpuDivision, MemoryUse]
    curves: list[Curve] = field(default_factory=list)
    left_out: list[Curve] = field(default_factory=list)
    not_reached: list[Curve] = field(default_factory=list)
    pairs: list[tuple[SimulatedPoint, SimulatedPoint]] = field(default_factory=list)

    def ranked(self, objectives: ObjectiveSettings) -> list[tuple[Curve, OperatingPoint]]:
        """Return the deployments that meet the objectives, the highest throughput first."""
        found = [(curve, best) for curve in self.curves if (best := curve.best(objectives)) is not None]
        return sorted(found, key=lambda each: -each[1].tokens_per_s)


class PlanSearch:
    """Searches under one seed, then compares the best two under others.

    Args:
        question: hardware, network, load and objectives.
        seconds_left: returns the seconds that are left. The answer decides only which simulations are made.
        on_step: receives a line about each step, for a progress bar.
    """

    def __init__(
        self,
        question: PlanQuestion,
        seconds_left: Callable[[], float] = lambda: float("inf"),
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._question, self._objectives = question, question.settings.objectives
        self._seed = question.settings.search.seed
        self._seconds_left, self._on_step = seconds_left, on_step
        self._estimator = Estimator(self._seed)
        self._kept_s = 0.0  # seconds that the search leaves for the comparison
        self.found = SearchFindings({each: memory_of(question, each) for each in divisions_of(question)})

    def run(self) -> SearchFindings:
        """Search until everything is known or the time is over; the first deployment is simulated in any case."""
        seconds = self._seconds_left()
        self._kept_s = seconds * _COMPARISON_SHARE if seconds < float("inf") else 0.0
        fitting = [
            FittingDivision(self._question, division, memory)
            for division, memory in self.found.memory.items()
            if memory.why_not is None
        ]
        curves = [Curve(each, self._estimated(each)) for each in fitting]
        curves.sort(key=lambda curve: -curve.estimated_tokens_per_s)
        # Modes in lock-step take a hundredth of the time, so they come first and set the mark for `async`.
        quick = [curve for curve in curves if curve.fitting.division.mode != "async"]
        for curve in [*quick, *(curve for curve in curves if curve not in quick)]:
            self._try(curve)
        self.found.curves.sort(key=lambda curve: -self._reached(curve))
        self._kept_s = 0.0
        self._compare()
        self._complete()
        return self.found

    @property
    def _is_late(self) -> bool:
        """Whether the time of this part of the search is over."""
        return self._seconds_left() <= self._kept_s

    @property
    def best_tokens_per_s(self) -> float:
        """Highest simulated throughput within the objectives; 0 if none is."""
        return max((self._reached(curve) for curve in self.found.curves), default=0.0)

    def _reached(self, curve: Curve) -> float:
        best = curve.best(self._objectives)
        return 0.0 if best is None else best.tokens_per_s

    # --- estimates --------------------------------------------------------------------------------------------------

    def _estimated(self, fitting: FittingDivision) -> float:
        """Estimate of the throughput within the objective of ITL; of one request an engine if it is never kept."""
        return self._estimated_best(fitting, self._objectives.max_itl).tokens_per_s

    def _estimated_best(self, fitting: FittingDivision, max_itl: float) -> EstimatedPoint:
        rungs = ladder(fitting)
        best = self._estimator.estimate(fitting, rungs[0])
        for number in rungs[1:]:
            point = self._estimator.estimate(fitting, number)
            if point.itl_ms > max_itl:
                break
            if point.tokens_per_s > best.tokens_per_s:
                best = point
        return best

    # --- simulations ------------------------------------------------------------------------------------------------

    def _try(self, curve: Curve) -> None:
        allowance = ASYNC_ALLOWANCE if curve.fitting.division.mode == "async" else ALLOWANCE
        if curve.estimated_tokens_per_s * allowance < self.best_tokens_per_s:
            self.found.left_out.append(curve)
            return
        if self._is_late and self.found.curves:
            self.found.not_reached.append(curve)
            return
        self.found.curves.append(curve)
        self._trace(curve)

    def _trace(self, curve: Curve) -> None:
        """Simulate a deployment around the largest number of requests that keeps the objectives."""
        fitting, is_async = curve.fitting, curve.fitting.division.mode == "async"
        bracket = _ASYNC_BRACKET if is_async else _BRACKET
        least, most = fitting.num_engines, max(ladder(fitting)[-1], fitting.num_engines)
        low, high = 0, most + 1  # numbers of requests that keep and that miss the objectives
        max_itl = self._objectives.max_itl * (_ASYNC_SHARE if is_async else 1)
        number = self._estimated_best(fitting, max_itl).num_requests
        for step in range(_MOST_STEPS):
            if step and self._is_late:
                return
            self._on_step(f"{fitting.division.title}: {number:,} requests")
            point = curve.run(number, self._seed)
            over = excess(point, self._objectives)
            if over <= 1:
                low = max(low, number)
            else:
                high = min(high, number)
                if point.tokens_per_s < self.best_tokens_per_s:  # with fewer requests, it is less
                    curve.is_dominated = True
                    return
            if low >= most or high <= least or (low and high <= low * bracket):
                return
            number = _next_number(number, over, (low, high), (least, most))
            if number in (low, high):
                return

    def _compare(self) -> None:
        """Run the best two under further seeds, each at its number of requests."""
        ranked = self.found.ranked(self._objectives)[:2]
        if len(ranked) < 2:
            return
        search = self._question.settings.search
        for seed in range(self._seed, self._seed + search.num_seeds):
            if self._is_late:
                return
            self._on_step(f"{ranked[0][0].fitting.division.title} and the runner-up: seed {seed}")
            first, second = (curve.fitting.run(best.num_requests, seed) for curve, best in ranked)
            self.found.pairs.append((first, second))

    def _complete(self) -> None:
        """Complete the curves of the best for the picture."""
        for curve, best in self.found.ranked(self._objectives)[:_SHOWN_CURVES]:
            is_async = curve.fitting.division.mode == "async"  # few requests make as many items, and take as long
            for share in _LOWER_POINTS[:1] if is_async else _LOWER_POINTS:
                number = round(best.num_requests * share)
                if number >= curve.fitting.num_engines and not self._is_late:
                    self._on_step(f"{curve.fitting.division.title}: {number:,} requests")
                    curve.run(number, self._seed)


def ladder(fitting: FittingDivision) -> list[int]:
    """Return numbers of requests for estimates, ascending: from one for each engine up to what fits the KV caches."""
    most, least = fitting.most_requests, fitting.num_engines
    rungs, number = [least], float(least)
    factor = 8 ** (1 / _NUM_RUNGS)
    while (number := number * factor) < most:
        rungs.append(round(number / least) * least)
    return sorted({*rungs, max(most, least)})


def _next_number(number: int, over: float, bracket: tuple[int, int], limits: tuple[int, int]) -> int:
    """Choose the next number of requests.

    Args:
        number: the last one.
        over: its largest latency as a multiple of the objective.
        bracket: largest number that keeps the objectives, 0 if none is known, and smallest that misses them.
        limits: smallest and largest number allowed.
    """
    low, high = bracket
    if low and high <= limits[1]:
        return round(math.sqrt(low * high))
    # Latency grows more slowly than the number, so this goes beyond the objective, but by less than twice.
    factor = min(1 / over * 1.1, 3.0) if over <= 1 else max(0.9 / over, 0.2)
    moved = round(number * max(factor, 1.25) if over <= 1 else number * factor)
    return max(min(moved, limits[1]), limits[0])


def measured_of(pairs: Sequence[tuple[SimulatedPoint, SimulatedPoint]]) -> list[float]:
    """Return the throughput of the first as a multiple of the second, for each pair of runs with equal seeds."""
    return [first.tokens_per_s / second.tokens_per_s for first, second in pairs]


def launch_of(fitting: FittingDivision, num_requests: int) -> ServerLaunch:
    """Return the servers of a deployment.

    A network that is named by its sizes alone has no weights, so Moestro's own servers start paced devices.

    Args:
        fitting: the deployment.
        num_requests: requests in progress in all groups.
    """
    question, division = fitting.question, fitting.division
    settings, limits = question.settings, fitting.limits(num_requests)
    serving, block_size = settings.serving, settings.search.block_size
    longest = min(question.lengths.longest_requested, fitting.memory.kv_tokens)
    launch = ServerLaunch(
        model=serving.serve_model or settings.model,
        mode=division.mode,
        num_servers=division.num_groups,
        gpus_per_server=division.gpus_per_group,
        gpus_per_machine=settings.hardware.gpus_per_machine,
        tensor_parallel_size=division.tensor_parallel_size,
        num_expert_workers=division.num_expert_workers,
        limits=limits,
        max_model_len=min(longest, question.max_positions or longest),
        further=serving.further,
    )
    if question.system.name == "moestro":
        kv_bytes = fitting.memory.num_blocks * block_size * question.network.kv_bytes_per_token
        launch = replace(launch, block_size=block_size, kv_cache_bytes=kv_bytes)
        return own_servers(launch, settings.model, question.gpu.name, question.within.name)
    share = settings.hardware.gpu_memory_utilization
    return replace(launch, memory_share=memory_share(question.system, question.gpu, share))


def assumptions_of(question: PlanQuestion, simulated: Sequence[FittingDivision]) -> list[str]:
    """State the constants that decide, with their sources, and what the simulation leaves out."""
    settings, lengths = question.settings, question.lengths
    search, modes = settings.search, {each.division.mode for each in simulated}
    lines = [
        (
            f"Steps are priced by the roofline of {question.gpu.name} in docs/costs.md (whole steps: 7 % mean error),"
            f" host: {VLLM_HOST.step_ns / 1e6:g} ms a step and {VLLM_HOST.sequence_ns / 1e3:g} us a sequence."
        ),
        (
            f"Prompts of {lengths.mean_prompt:.0f} tokens are computed without prefix cache, answers have"
            f" {lengths.mean_output:.0f} (means). The number of requests in progress is constant, without bursts."
        ),
        (
            f"A GPU may use {settings.hardware.gpu_memory_utilization:g} of its memory;"
            f" {WORKSPACE_BYTES / 1e9:.0f} GB of it are workspace."
        ),
        f"Links: {question.within.name} inside a machine, {question.across.name} between machines.",
    ]
    if question.network.experts is not None:
        where = "others in each layer" if settings.traffic.hot_experts == "permuted" else "the same in all layers"
        lines.append(
            f"Experts have the popularity {settings.traffic.popularity}, hot ones {where}; it is an assumption that"
            " decides between the modes. Experts have no copies and do not move."
        )
    if modes - {"async"} and question.network.experts is not None:
        lines.append("In lock-step, the experts of a layer are one grouped product.")
    if "async" in modes:
        lines.append(
            f"In async, each expert is an item of its own under the step policy {STEP_POLICY}; an item costs its host"
            f" {search.host_attention_us:g} us (attention) or {search.host_expert_us:g} us (experts), a budget that is"
            " not measured on a GPU. Messages have two phases."
        )
    lines += [
        (
            f"Deployments are not simulated if {ALLOWANCE:g} times their estimate ({ASYNC_ALLOWANCE:g} in async) is"
            " below a simulated throughput."
        ),
        (
            "Not modelled: the API server, pipeline parallelism, tensor parallelism inside ep and async, speculative"
            " decoding, separate prefill GPUs, failures."
        ),
        *unnamed_notes(settings),
        *question.notes,
    ]
    return lines


_CONFIDENCE = 0.975  # one side of a 95 % interval


class PlannedDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated deployment.

    Attributes:
        title: short name.
        mode, num_groups, num_attention_workers, num_expert_workers: division of the GPUs; workers are those of a group.
        status: `kept`: it keeps the objectives. `missed`: it does not. `dominated`: the search left it because it
            cannot be the best; its figures are then a lower bound. `left out`: its estimate is too low. `not reached`:
            the time was over.
        memory: memory of its GPUs.
        estimated_tokens_per_s: estimate of its throughput.
        num_requests, tokens_per_s, itl_ms, ttft_ms: the most within the objectives. None means that nothing is.
        limits: limits of each engine there.
        share_of_rate: throughput over that of --request-rate. None means that no rate was requested.
        points: simulated runs.
        commands: commands that start it. Empty means that only the simulator runs it, for the reason of `why_not`.
        why_not: reason why the chosen server does not run it.
    """

    title: str
    mode: str
    num_groups: int
    num_attention_workers: int
    num_expert_workers: int
    status: str
    memory: MemoryUse
    estimated_tokens_per_s: float
    num_requests: int | None = None
    tokens_per_s: float | None = None
    itl_ms: float | None = None
    ttft_ms: float | None = None
    limits: RunLimits | None = None
    share_of_rate: float | None = None
    points: list[SimulatedPoint] = []
    commands: list[str] = []
    why_not: str | None = None


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """The winner's throughput as a multiple of the runner-up's, over seeds.

    Attributes:
        first, second: titles.
        mean: mean of the ratios.
        low, high: bounds of their 95 % interval (Student's t). With one seed they are unknown, 0 and inf.
        num_seeds: seeds.
    """

    first: str
    second: str
    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def is_tie(self) -> bool:
        """Whether the ratio may be 1."""
        return self.low <= 1 <= self.high


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `moestro plan`.

    Attributes:
        kind: kind of evidence.
        settings: settings as given.
        winner: title of the deployment with the most throughput within the objectives. None means that none keeps them.
        served: title of the best one that the chosen server runs.
        nearest: title of the deployment that comes nearest to the objectives, and `nearest_point` its run, if none
            keeps them.
        nothing_fits: sentence about the GPUs that would be needed, if no deployment fits.
        margin: comparison of the best two. None means that fewer than two keep the objectives.
        deployments: all that fit, the best first.
        misfits: why the others do not fit, by title.
        assumptions: what decides the figures, and what is left out.
        host_memory: how much host memory pays for the log. None means that it was not requested.
    """

    kind: str = "simulated"
    moestro: str = __version__
    settings: object
    winner: str | None
    served: str | None
    nearest: str | None
    nearest_point: SimulatedPoint | None
    nothing_fits: str | None
    margin: Margin | None
    deployments: list[PlannedDeployment]
    misfits: dict[str, str]
    assumptions: list[str]
    host_memory: HostMemoryAnswer | None = None

    def named(self, title: str) -> PlannedDeployment:
        """Return a deployment by its title."""
        return next(each for each in self.deployments if each.title == title)


def make_plan(question: PlanQuestion, found: SearchFindings) -> DeploymentPlan:
    """Judge what the search found."""
    objectives, ranked = question.settings.objectives, found.ranked(question.settings.objectives)
    margin = margin_of(found, ranked)
    order = [curve for curve, _ in ranked]
    if margin is not None and margin.mean < 1:  # over all seeds the runner-up is ahead
        order[:2], margin = order[1::-1], inverted(margin)
    rest = [curve for curve in found.curves if curve not in order]
    bests = {id(curve): best for curve, best in ranked}
    deployments = [_described(question, curve, bests.get(id(curve))) for curve in [*order, *rest]]
    deployments += [_described(question, curve, None, "left out") for curve in found.left_out]
    deployments += [_described(question, curve, None, "not reached") for curve in found.not_reached]
    served = next((curve for curve in order if why_not_served(question, curve.fitting.division) is None), None)
    near = None if ranked else min(
        ((curve, point) for curve in found.curves for point in curve.points),
        key=lambda each: excess(each[1], objectives),
        default=None,
    )  # fmt: skip
    return DeploymentPlan(
        settings=msgspec.to_builtins(question.settings, enc_hook=str),
        winner=order[0].fitting.division.title if order else None,
        served=None if served is None else served.fitting.division.title,
        nearest=None if near is None else near[0].fitting.division.title,
        nearest_point=None if near is None else near[1],
        nothing_fits=None if deployments else _nothing_fits(question),
        margin=margin,
        deployments=deployments,
        misfits={each.title: use.why_not for each, use in found.memory.items() if use.why_not is not None},
        assumptions=assumptions_of(question, [curve.fitting for curve in found.curves]),
    )


def margin_of(found: SearchFindings, ranked: list[tuple[Curve, OperatingPoint]]) -> Margin | None:
    """Compare the best two over seeds. None means that there are no two."""
    if len(ranked) < 2:
        return None
    (first, best), (second, other) = ranked[:2]
    ratios = measured_of(found.pairs) or [best.tokens_per_s / other.tokens_per_s]
    mean, low, high = fmean(ratios), 0.0, math.inf
    if len(ratios) > 1:
        half = student_t_quantile(_CONFIDENCE, len(ratios) - 1) * stdev(ratios) / len(ratios) ** 0.5
        low, high = mean - half, mean + half
    titles = (first.fitting.division.title, second.fitting.division.title)
    return Margin(first=titles[0], second=titles[1], mean=mean, low=low, high=high, num_seeds=len(ratios))


def inverted(margin: Margin) -> Margin:
    """Return the margin with the runner-up first."""
    return Margin(
        first=margin.second, second=margin.first, mean=1 / margin.mean, low=1 / margin.high,
        high=1 / margin.low if margin.low > 0 else math.inf, num_seeds=margin.num_seeds,
    )  # fmt: skip


def _described(
    question: PlanQuestion, curve: Curve, best: OperatingPoint | None, status: str | None = None
) -> PlannedDeployment:
    fitting, division = curve.fitting, curve.fitting.division
    if status is None:
        status = "dominated" if curve.is_dominated else "missed" if best is None else "kept"
    needed, why_not = question.tokens_per_s_needed, why_not_served(question, division)
    return PlannedDeployment(
        title=division.title,
        mode=division.mode,
        num_groups=division.num_groups,
        num_attention_workers=division.num_attention_workers,
        num_expert_workers=division.num_expert_workers,
        status=status,
        memory=fitting.memory,
        estimated_tokens_per_s=curve.estimated_tokens_per_s,
        num_requests=None if best is None else best.num_requests,
        tokens_per_s=None if best is None else best.tokens_per_s,
        itl_ms=None if best is None else best.itl_ms,
        ttft_ms=None if best is None or np.isnan(best.ttft_ms) else best.ttft_ms,
        limits=None if best is None else fitting.limits(best.num_requests),
        share_of_rate=None if best is None or needed is None else best.tokens_per_s / needed,
        points=curve.points,
        commands=[] if best is None or why_not else question.system.commands(launch_of(fitting, best.num_requests)),
        why_not=why_not,
    )


def _nothing_fits(question: PlanQuestion) -> str:
    hardware, network = question.settings.hardware, question.network
    some = f"{network.name} does not fit {hardware.num_gpus} {question.gpu.name}"
    fewest = fewest_gpus(question)
    if fewest is None:
        return f"{some}, nor any number of them: take a GPU with more memory, or shorter requests"
    number, division = fewest
    return f"{some}; {number} would do, as {division.title}"
