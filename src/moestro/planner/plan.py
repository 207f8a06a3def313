"""The answer of `moestro plan`: what wins, by how much, and the figures behind it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

import msgspec
import numpy as np

from moestro import __version__
from moestro.core.student_t import student_t_quantile
from moestro.cost.capacity import WORKSPACE_BYTES
from moestro.cost.roofline import VLLM_HOST
from moestro.planner.curves import Curve, OperatingPoint, excess
from moestro.planner.divisions import why_not_served
from moestro.planner.host_memory import HostMemoryAnswer
from moestro.planner.memory import MemoryUse, fewest_gpus
from moestro.planner.question import PlanQuestion
from moestro.planner.search import ALLOWANCE, ASYNC_ALLOWANCE, SearchFindings, measured_of
from moestro.planner.settings import unnamed_notes
from moestro.planner.simulated import FittingDivision, SimulatedPoint
from moestro.planner.systems import STEP_POLICY, RunLimits, ServerLaunch, memory_share, own_servers


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
    launch = ServerLaunch(
        model=serving.serve_model or settings.model,
        mode=division.mode,
        num_servers=division.num_groups,
        gpus_per_server=division.gpus_per_group,
        gpus_per_machine=settings.hardware.gpus_per_machine,
        tensor_parallel_size=division.tensor_parallel_size,
        num_expert_workers=division.num_expert_workers,
        limits=limits,
        max_model_len=min(question.lengths.longest_requested, fitting.memory.kv_tokens),
        further=tuple(shlex.split(serving.server_flags)),
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
