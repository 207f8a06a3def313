"""LMetric's set-up (arXiv 2603.15202) as a table."""

from __future__ import annotations

from typing import Any

from moestro.core.clock import NS_PER_S
from moestro.repro.lmetric.claims import RIVALS
from moestro.repro.lmetric.findings import NETWORK, OTHER_NETWORK
from moestro.repro.paper_setup import SetupRow
from moestro.repro.sources import SCORED_SEED, TUNING_SEED
from moestro.sim.figures.results import WINDOW_NS
from moestro.workload.rows import Rows


def _testbed(experiment: Any) -> tuple[int, str]:
    [bed] = {experiment.bed(source) for source in experiment.sources.values()}
    return bed.num_engines, bed.gpu.name


def _shared_requests(experiment: Any) -> int:
    """Requests, by times and lengths, that both tune parameters and are scored."""
    seeds = (TUNING_SEED, SCORED_SEED)
    pairs = [[_requests(source.rows_of(seed)) for seed in seeds] for source in experiment.sources.values()]
    return sum(len(tuning & scored) for tuning, scored in pairs)


def _requests(rows: Rows) -> set[tuple[int, int, int]]:
    assert rows.timestamp_ns is not None, "sources have times"
    columns = (rows.timestamp_ns, rows.num_prompt_tokens, rows.num_output_tokens)
    return set(zip(*(column.tolist() for column in columns), strict=True))


SETUP = (
    SetupRow(
        what="engines and GPU",
        where="section 4.1",
        quote="a testbed containing 16 NVIDIA H20 GPUs",
        value=(16, "h20-96g"),
        ours=_testbed,
    ),
    SetupRow(
        what="networks",
        where="section 4.1",
        quote="dense (Qwen2-7B) and mixture-of-experts (MoE) models (Qwen3-30B)",
        value=("qwen3-30b-a3b", "qwen2-7b"),
        ours=lambda experiment: (NETWORK, OTHER_NETWORK),
    ),
    SetupRow(
        what="rate, as a share of the capacity",
        where="section 4.1",
        quote="we scale the average request arrival rate to half of the maximum rate of our testbed",
        value=0.5,
        ours=lambda experiment: experiment.plan.shares[0],
    ),
    SetupRow(
        what="further rates",
        where="Fig. 25",
        quote="End-to-end performance under different request rates",
        value=(0.9, 1.2),
        ours=lambda experiment: experiment.plan.shares[1:],
        differs="the paper prints no rates; ours are near the capacity and beyond it",
    ),
    SetupRow(
        what="rivals",
        where="section 6",
        quote="Bailian is the production scheduler used in Bailian's LLM serving system",
        value=("vllm-0.26", "bailian", "dynamo", "llm-d"),
        ours=lambda experiment: tuple(name for name in RIVALS if name in experiment.plan.policies),
    ),
    SetupRow(
        what="policies with tuned parameters",
        where="section 6",
        quote="Similar to Bailian, we also tune its hyperparameters for each workload for optimal performance",
        value=("bailian", "dynamo", "aibrix"),
        ours=lambda experiment: tuple(experiment.tuned),
    ),
    SetupRow(
        what="requests that both tune and are scored",
        where="section 6",
        quote="We have carefully tuned its hyperparameters for each workload to achieve the best performance",
        value=0,
        ours=_shared_requests,
        differs="the paper does not state on which requests it tunes; ours are other sessions of the same kind",
    ),
    SetupRow(
        what="loads",
        where="section 4.1",
        quote="cover common LLM applications",
        value=("chat", "api_agent", "coder", "tool_agent"),
        ours=lambda experiment: tuple(experiment.sources),
        differs="generated sessions with the traces' published means; Mooncake's traces join with --traces",
    ),
    SetupRow(
        what="window of prefill seconds, s",
        where="Fig. 27",
        quote="the absolute served prefill time in each 10-second window",
        value=10.0,
        ours=lambda experiment: WINDOW_NS / NS_PER_S,
    ),
)
