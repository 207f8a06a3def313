"""Compares layered prefill with chunked prefill in simulation, at the paper's models and lengths.

    python bench/simulator/layered_prefill.py [--chat TRACE] [--long TRACE] [--seeds 3] \\
        [--json bench/results/simulator/layered_prefill.json]

Everything is simulated: the production scheduler, flow and step policies on one priced H100. The baseline computes each
step as one forward pass (`in_order`) with chunks of a prompt. The experts of each token are drawn, the same for all.
An expert costs what it adds to a grouped product, so that more, smaller calls are not punished for their launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moestro.config.run_record import run_record
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import gpu_named, kv_blocks
from moestro.cost.model import Batch, PopularityForm
from moestro.cost.networks import network_named
from moestro.cost.roofline import HostCost, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy
from moestro.sim.groups.worker_group import StagedRank
from moestro.workload.rows import RequestForm, RequestMaker, Rows
from moestro.workload.traces.reading import read_trace

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

GPU, BLOCK_SIZE, MAX_NUM_SEQS, LONGEST = gpu_named("h100"), 16, 256, 16_384
NETWORKS = ("qwen3-30b-a3b", "gpt-oss-20b")  # those of the paper
CHUNKS = (512, 1024)
NUM_GROUPS = 16  # most groups of a wave; it has one for each 512 tokens
WHOLE = 8192  # tokens of one wave, as in the paper's code
PAPERS_CHUNKS, PAPERS_GROUPS = "chunks of 512", "16 groups"
SLACK = 1.05  # a baseline may have gaps longer by this factor, so that noise of the seeds does not exclude it
# Requests a second: decodes and prompts share most steps, below the saturation of chunks of 512 and near it.
RATES = {
    ("long", "qwen3-30b-a3b"): (0.6, 1.2), ("long", "gpt-oss-20b"): (2, 4),
    ("chat", "qwen3-30b-a3b"): (4, 10), ("chat", "gpt-oss-20b"): (10, 30),
}  # fmt: skip
NUM_REQUESTS = {"chat": 80, "long": 24}
# Mean tokens of prompts and answers without a trace, and the shape of their gamma distributions, (mean / deviation)²:
# ShareGPT's, and those of the paper's trace arxiv_summarization below 16,384 tokens.
GENERATED = {"chat": ((1155, 1.5), (211, 1.5)), "long": ((7200, 4.4), (210, 5.0))}


class GroupedRoofline(Roofline):
    """Roofline whose experts of a layer are one grouped product.

    The layer pays the start of the product once, with its attention, and each expert the overlapped time of its bytes
    and its arithmetic.
    """

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Price the attention of a layer and the start of its experts."""
        return super().attention_ns(layer, batch) + round(GPU.expert_start_ns)

    def expert_ns(self, num_rows: int) -> int:
        """Price the part of one expert in the grouped product."""
        return round(self._kernels.experts_ns(1, num_rows) - GPU.expert_start_ns)


@dataclass(frozen=True, slots=True)
class System:
    """A step policy, and the tokens of one plan."""

    policy: str
    budget: int


class Load(NamedTuple):
    """Requests and their arrivals, ns."""

    maker: RequestMaker
    arrivals_ns: np.ndarray


def systems() -> dict[str, System]:
    """Return all systems by name."""
    chunked = {f"chunks of {size}": System("in_order", size) for size in CHUNKS}
    return chunked | {PAPERS_GROUPS: System(f"layered_prefill:num_groups={NUM_GROUPS}", WHOLE)}


def draw_load(kind: str, trace: Path | None, rate: float, seed: int) -> Load:
    """Draw lengths from the trace, or around its published means, and Poisson arrivals."""
    rng, num = np.random.default_rng(seed), NUM_REQUESTS[kind]
    if trace is None:
        prompts, answers = (np.minimum(rng.gamma(shape, mean / shape, num).astype(np.int64) + 1, LONGEST)
                            for mean, shape in GENERATED[kind])  # fmt: skip
    else:
        rows = read_trace(trace)
        fits = np.flatnonzero((rows.num_prompt_tokens <= LONGEST) & (rows.num_output_tokens > 1))
        some = rng.choice(fits, num)
        prompts, answers = rows.num_prompt_tokens[some], rows.num_output_tokens[some]
    maker = RequestMaker(
        Rows(num_prompt_tokens=prompts, num_output_tokens=np.maximum(answers, 2)),
        RequestForm(block_size=BLOCK_SIZE, names_blocks=False),
    )
    return Load(maker, np.cumsum(rng.exponential(1e9 / rate, num)).astype(np.int64))


def make_rank(network: str, system: System, seed: int) -> StagedRank:
    """Make a rank on one H100."""
    shape = network_named(network)
    experts = shape.experts
    assert experts is not None, "both networks have experts"
    cost = GroupedRoofline(RooflineSettings(network=shape, gpu=GPU, host=HostCost(step_ns=0, sequence_ns=0)))
    popularity = PopularityForm(hot_ids="permuted", seed=seed).by_layer(shape.num_layers, experts.num_experts)
    bounds = SchedulerSettings(
        num_blocks=kv_blocks(shape, GPU, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=2 * LONGEST,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max(system.budget, MAX_NUM_SEQS),
        enable_prefix_caching=False,
    )
    gate = PopularityGate(popularity, experts.top_k, seed)
    return StagedRank(bounds, cost, make_step_policy(system.policy, float("inf")), passes_decodes=True, gate=gate)


def serve(rank: StagedRank, load: Load) -> dict[str, list[int]]:
    """Serve all requests; return the times of each one's tokens, ns."""
    times: dict[str, list[int]] = {}
    waiting = list(enumerate(load.arrivals_ns.tolist()))[::-1]
    while waiting or rank.next_ns is not None:
        if waiting and (rank.next_ns is None or waiting[-1][1] <= rank.next_ns):
            index, now_ns = waiting.pop()
            request, script = load.maker.make(index, now_ns)
            times[request.request_id] = [now_ns]
            rank.add(0, request, script, now_ns)
            continue
        now_ns = rank.next_ns
        (output,) = rank.turn(now_ns)
        for sequence in output.sequences:
            times[sequence.request.request_id].append(now_ns)
    return times


def figures(network: str, system: System, load: Load, seed: int) -> dict[str, float]:
    """Simulate one system; return its latencies, and the bytes of experts that it reads for each token."""
    rank = make_rank(network, system, seed)
    tokens = [np.array(each) / 1e6 for each in serve(rank, load).values()]
    gaps = np.concatenate([np.diff(each[1:]) for each in tokens])
    ttft = np.array([each[1] - each[0] for each in tokens])
    rows = load.maker.rows
    num_tokens = int(rows.num_prompt_tokens.sum() + rows.num_output_tokens.sum())
    return {
        "ttft_ms": float(ttft.mean()),
        "ttft_p99_ms": float(np.percentile(ttft, 99)),
        "tpot_ms": float(np.mean([(each[-1] - each[1]) / (len(each) - 2) for each in tokens if len(each) > 2])),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "latency_ms": float(np.mean([each[-1] - each[0] for each in tokens])),
        "expert_mb_per_token": rank.device.num_expert_calls * network_named(network).expert_bytes / num_tokens / 1e6,
        "busy_share": rank.device.busy_ns / 1e6 / max(each[-1] for each in tokens),
    }


class Part(NamedTuple):
    """One simulation: its load, network, rate, system and seed, and the traces by load."""

    load: str
    network: str
    rate: float
    system: str
    seed: int
    traces: dict[str, Path | None]


def measure(part: Part) -> dict[str, float]:
    """Simulate one part."""
    load = draw_load(part.load, part.traces[part.load], part.rate, part.seed)
    return figures(part.network, systems()[part.system], load, part.seed)


def summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return mean, least and most of each figure over the seeds."""
    columns = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: [round(each, 3) for each in (statistics.mean(column), min(column), max(column))]
            for name, column in columns.items()}  # fmt: skip


def tuned(by_system: dict[str, list[dict[str, float]]]) -> str:
    """Name the chunks with the earliest first token among those whose gaps are about as short as with 16 groups."""
    means = {name: summary(runs) for name, runs in by_system.items()}
    chunked = [name for name in by_system if name.startswith("chunks")]
    bound = SLACK * means[PAPERS_GROUPS]["gap_p99_ms"][0]
    fitting = [name for name in chunked if means[name]["gap_p99_ms"][0] <= bound]
    if not fitting:
        return min(chunked, key=lambda name: means[name]["gap_p99_ms"][0])
    return min(fitting, key=lambda name: means[name]["ttft_ms"][0])


def ratios(ours: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return mean, least and most of the ratio of each figure, seed by seed."""
    return summary([{name: own[name] / other[name] for name in own} for own, other in zip(ours, others, strict=True)])


def compare(by_system: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Return the figures of all systems, and 16 groups over the paper's chunks and over tuned ones."""
    best, ours = tuned(by_system), by_system[PAPERS_GROUPS]
    return {
        "systems": {name: summary(runs) for name, runs in by_system.items()},
        "over chunks of 512": ratios(ours, by_system[PAPERS_CHUNKS]),
        "tuned": best,
        "over tuned": ratios(ours, by_system[best]),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--chat", type=Path, help="trace of chats; without one, lengths are generated")
    parser.add_argument("--long", type=Path, help="trace of long prompts")
    parser.add_argument("--loads", nargs="+", default=["long", "chat"], choices=["long", "chat"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args: argparse.Namespace = parser.parse_args()
    traces = {"chat": args.chat, "long": args.long}
    conditions = run_record("simulated")
    found: dict[str, object] = {
        "seeds": args.seeds,
        "traces": {kind: path.name if path else "generated" for kind, path in traces.items()},
        "requests": NUM_REQUESTS,
    }
    with Pool(args.jobs) as pool:
        for (kind, network), rates in RATES.items():
            for rate in rates if kind in args.loads else ():
                parts = [Part(kind, network, rate, name, seed, traces)
                         for name in systems() for seed in range(args.seeds)]  # fmt: skip
                runs = pool.map(measure, parts, chunksize=1)
                by_system = {name: [run for part, run in zip(parts, runs, strict=True) if part.system == name]
                             for name in systems()}  # fmt: skip
                found[f"{kind}, {network}, {rate:g} requests/s"] = compare(by_system)
                print(f"{kind}, {network}, {rate:g} requests/s", json.dumps(compare(by_system)), flush=True)
                save(args.json, conditions, found)


if __name__ == "__main__":
    main()
