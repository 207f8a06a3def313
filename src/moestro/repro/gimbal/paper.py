"""Gimbal's set-up (arXiv 2602.21626) as a table. Of the second paper only the abstract is public."""

from __future__ import annotations

import inspect

from moestro.engine.policies.ordering.ageing import Sjf
from moestro.repro.experiment import PartsExperiment
from moestro.repro.gimbal.findings import GimbalFindings
from moestro.repro.gimbal.parts import GimbalPart
from moestro.repro.gimbal.systems import DPLB, EDR, GIMBAL_V1, SJFS, VLLM
from moestro.repro.paper_setup import PaperFigure, SetupRow
from moestro.routing.policies.gimbal import GimbalV1

_Experiment = PartsExperiment[GimbalFindings, GimbalPart]

_LATENCIES = ("healthy_", "slow_", "scarce_")  # parts of the latency tables
_PREFIXES = "prefix_"


def _latency_parts(experiment: _Experiment) -> list[GimbalPart]:
    return [part for name, part in experiment.parts.items() if name.startswith(_LATENCIES)]


def _prefix_parts(experiment: _Experiment) -> list[GimbalPart]:
    return [part for name, part in experiment.parts.items() if name.startswith(_PREFIXES)]


def _default(policy: type, name: str) -> object:
    """The default of a policy's parameter."""
    return inspect.signature(policy).parameters[name].default


SETUP = (
    SetupRow(
        what="GPU and ranks",
        where="section V-A1",
        quote="two NVIDIA A100 80GB GPUs interconnected via NVLink",
        value={("a100-80g", 2, 1)},
        ours=lambda experiment: {
            (part.bed.gpu, part.bed.num_ranks, part.bed.num_machines) for part in _latency_parts(experiment)
        },
    ),
    SetupRow(
        what="network",
        where="section V-A3",
        quote="we select the Qwen3-30B-A3B model",
        value={"qwen3-30b-a3b"},
        ours=lambda experiment: {part.bed.network for part in experiment.parts.values()},
    ),
    SetupRow(
        what="requests a second",
        where="section V-B1",
        quote="at request rates of 1.0, 1.2, and 1.4 RPS",
        value={(1.0, 1.2, 1.4)},
        ours=lambda experiment: {part.rates for part in _latency_parts(experiment)},
    ),
    SetupRow(
        what="requests of a run",
        where="section V-B1",
        quote="with one set of 1,000 randomly selected requests per each distribution",
        value={1000},
        ours=lambda experiment: {part.num_requests for part in _latency_parts(experiment)},
    ),
    SetupRow(
        what="shapes of the lengths",
        where="section V-A4",
        quote="Random, Central, Descending, Two-end, and Average",
        value=("random", "central", "descending", "two-end", "average"),
        ours=lambda experiment: tuple(dict.fromkeys(part.shape for part in _latency_parts(experiment))),
    ),
    SetupRow(
        what="seeds at the highest rate",
        where="section V-B1",
        quote="three independent repeated experiments for both vLLM and Gimbal at 1.4 RPS",
        value={3},
        ours=lambda experiment: {len(part.seeds) for part in _latency_parts(experiment) if part.repeated},
    ),
    SetupRow(
        what="all rivals on equal seeds: requests, requests a second, seeds",
        where="section V-B1",
        quote="each run preserves the same workload distribution but samples different requests",
        value={(1000, (1.4,), 3)},
        ours=lambda experiment: {
            (part.num_requests, part.rates, len(part.seeds))
            for name, part in experiment.parts.items()
            if name.startswith("equal_")
        },
    ),
    SetupRow(
        what="prefix caching in the latency tables",
        where="section V-A4",
        quote="During performance experiments, we disable prefix caching",
        value={False},
        ours=lambda experiment: {part.bed.has_cache for part in _latency_parts(experiment)},
    ),
    SetupRow(
        what="systems of the ablation",
        where="section V-A7",
        quote="as well as three ablated variants of our proposed framework",
        value=True,
        ours=lambda experiment: all(
            {VLLM, DPLB, SJFS, EDR, GIMBAL_V1} <= set(part.systems) for part in _latency_parts(experiment)
        ),
    ),
    SetupRow(
        what="theta_kv",
        where="section V-A2",
        quote="to 0.9. That is, if the KV cache usage of a certain engine exceeds 90%",
        value=0.9,
        ours=lambda _: _default(GimbalV1, "kv_threshold"),
    ),
    SetupRow(
        what="theta_diff",
        where="section V-A2",
        quote="to 10%, allowing a reasonable tolerance",
        value=0.1,
        ours=lambda _: _default(GimbalV1, "kv_gap"),
    ),
    SetupRow(
        what="theta_load, tokens",
        where="section V-A2",
        quote="in which 97.6% of requests contain no more than 3000 tokens",
        value=3000.0,
        ours=lambda _: _default(GimbalV1, "load_gap"),
    ),
    SetupRow(
        what="theta_age, s",
        where="section V-A2",
        quote="to 5 seconds",
        value=5.0,
        ours=lambda _: _default(Sjf, "theta_age_s"),
    ),
    SetupRow(
        what="tau, steps",
        where="section V-A2",
        quote="perform expert re-migration by default every 3000 steps",
        value={3000},
        ours=lambda experiment: {part.bed.interval_steps for part in _latency_parts(experiment)},
    ),
    SetupRow(
        what="KV blocks of a rank, in the tables of scarce memory",
        where="",
        quote="",
        value={512},
        ours=lambda experiment: {
            part.bed.num_blocks for part in _latency_parts(experiment) if part.name.startswith("scarce_")
        },
        differs="an A100 has 24,945; with all of them theta_kv never binds at the paper's rates",
    ),
    SetupRow(
        what="prefix hits: requests, runs",
        where="section V-B3",
        quote="We run five independent experiments, each consisting of the same set of 10,000 requests",
        value={(10_000, 5)},
        ours=lambda experiment: {(part.num_requests, part.num_runs) for part in _prefix_parts(experiment)},
    ),
    SetupRow(
        what="prefix hits: requests a second",
        where="",
        quote="",
        value={(30.0,)},
        ours=lambda experiment: {part.rates for part in _prefix_parts(experiment)},
        differs="the paper prints no rate",
    ),
)

MARGIN = 0.02  # a smaller change counts as none


def _change(what: str, where: str, quote: str, value: float) -> PaperFigure:
    return PaperFigure(what=what, where=where, quote=quote, value=value, least=MARGIN)


# Mean changes from vLLM over the shapes at 1.4 requests a second; of the second paper, only the abstract is public.
V1 = {
    "TTFT": _change("v1: TTFT", "v1, V-B1", "corresponding to 17.76% across all five distributions", -0.1776),
    "TPOT": _change("v1: TPOT", "v1, V-B2", "an average TPOT reduction of 13.34%", -0.1334),
}
V2 = {
    "TTFT": _change("v2: TTFT", "v2, abstract", "reduces average Time To First Token (TTFT) by 42.9%", -0.429),
    "TPOT": _change("v2: TPOT", "v2, abstract", "average Time Per Output Token (TPOT) by 33.3%", -0.333),
    "throughput": _change("v2: throughput", "v2, abstract", "high-load request throughput by 3.0%", 0.030),
}
FIGURES = (*V1.values(), *V2.values())
