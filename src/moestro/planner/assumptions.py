"""The assumptions behind a plan, as sentences for its readers."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.cost.capacity import WORKSPACE_BYTES
from moestro.cost.roofline import VLLM_HOST
from moestro.planner.question import PlanQuestion
from moestro.planner.search import ALLOWANCE, ASYNC_ALLOWANCE
from moestro.planner.simulated import STEP_POLICY, FittingDivision


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
        *question.notes,
    ]
    return lines
