"""Measures the speed of the baselines of expert parallelism in CPU-seconds per simulated second.

    python bench/simulator/baseline_speed.py --json bench/results/simulator/baseline_speed.json

Mixtral 8x7B with multi-query attention on 8 A100: 32 layers, 8 experts, 1,000 sequences that decode from the start.
Popularity is exponential with AMoE's rate, and either the same experts are hot in all layers, or others in each. Tokens
per second, stall shares and the bound are simulated, not measured.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.cost.collectives import all_reduce, all_to_all
from moestro.cost.drawn_step import Deployment
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import A100
from moestro.cost.hf_config import network_named
from moestro.cost.links import NVSWITCH_A100
from moestro.cost.model import Batch
from moestro.cost.popularity import AMOE_RATE, PopularityForm
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tensor_parallel import network_share
from moestro.engine.settings import SchedulerSettings
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import ANY_ENGINE, RouterSettings
from moestro.sim.arrivals import AtTimes
from moestro.sim.baselines import (
    LOCK_STEP,
    PING_PONG,
    TWO_BATCH_OVERLAP,
    StepPricing,
    disaggregated,
    expert_parallel,
    plain_replica,
    with_stalls,
)
from moestro.sim.cluster import Cluster
from moestro.sim.lock_step_group import LockStepGroup
from moestro.sim.throughput_bound import drawn_visits, least_times, least_work_ns, throughput_bound
from moestro.workload.requests import RequestForm, RequestMaker
from moestro.workload.rows import Rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

REPEATS = 5
NUM_GPUS, NUM_SEQUENCES, NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS = 8, 1000, 100, 100
TP_GPUS = 2  # 93 GB of weights do not fit a single GPU
NETWORK = network_named("mixtral-8x7b-mqa")
BOUNDS = SchedulerSettings(
    num_blocks=30_000, block_size=16, max_model_len=512, max_num_seqs=1024, max_num_batched_tokens=8192
)


@cache
def roofline(tp_gpus: int = 1) -> Roofline:
    """Return the prices of a GPU, or of one GPU's share of a replica."""
    return Roofline(RooflineSettings(network=network_share(NETWORK, tp_gpus, 1), gpu=A100))


def gate(hot_ids: str) -> PopularityGate:
    """Return the gate of all baselines."""
    form = PopularityForm(family="exponential", skew=AMOE_RATE, hot_ids=hot_ids)
    return PopularityGate(form.by_layer(NETWORK.num_layers, 8), NETWORK.experts.top_k)


def cases(hot_ids: str) -> dict[str, tuple[list[Deployment], StepPricing]]:
    """Return the groups and the pricing of each baseline, on eight GPUs each."""
    drawn, cost, link = gate(hot_ids), roofline(), all_to_all(NVSWITCH_A100, NETWORK)
    exchanging = expert_parallel(cost, drawn, NUM_GPUS, link)
    replica = plain_replica(roofline(TP_GPUS), drawn, all_reduce(NVSWITCH_A100, NETWORK, TP_GPUS))
    return {
        "ideal ep": ([expert_parallel(cost, drawn, NUM_GPUS)], LOCK_STEP),
        "ep": ([exchanging], LOCK_STEP),
        "ep, two-batch overlap": ([exchanging], TWO_BATCH_OVERLAP),
        "2 attention + 6 expert GPUs, ping-pong": ([disaggregated(cost, drawn, 2, 6, link)], PING_PONG),
        "4 attention + 4 expert GPUs, ping-pong": ([disaggregated(cost, drawn, 4, 4, link)], PING_PONG),
        f"{NUM_GPUS // TP_GPUS} replicas of {TP_GPUS} GPUs": ([replica] * (NUM_GPUS // TP_GPUS), LOCK_STEP),
        "ep, published stalls": ([expert_parallel(cost, drawn, NUM_GPUS)], with_stalls()),
    }


def simulate(deployments: list[Deployment], pricing: StepPricing) -> dict[str, float]:
    """Serve all sequences on the groups."""
    num_engines = sum(deployment.num_ranks for deployment in deployments)
    rows = Rows(
        num_prompt_tokens=np.full(NUM_SEQUENCES, NUM_PROMPT_TOKENS),
        num_output_tokens=np.full(NUM_SEQUENCES, NUM_OUTPUT_TOKENS),
    )
    router = Router(policy_from("round_robin"), RouterSettings(block_size=16))
    for _ in range(num_engines):
        router.set_routable(router.add_engine(ANY_ENGINE), routable=True)
    groups = [LockStepGroup(BOUNDS, deployment, pricing) for deployment in deployments]
    began = time.process_time()
    results = Cluster(groups, router).run(
        RequestMaker(rows, RequestForm(block_size=16)), AtTimes(np.zeros(NUM_SEQUENCES, np.int64))
    )
    cpu_s = time.process_time() - began
    assert results.is_answered.all(), "a request was not answered"
    first_ns, last_ns = int(results.first_token_ns.max()), int(results.last_token_ns.max())
    return {
        "cpu_s": cpu_s,
        "simulated_s": last_ns / 1e9,
        "num_steps": sum(group.num_steps for group in groups),
        "decode_tokens_per_s": NUM_SEQUENCES * (NUM_OUTPUT_TOKENS - 1) / (last_ns - first_ns) * 1e9,
        "mean_stall_share": float(np.mean([group.stall_shares.mean() for group in groups])),
    }


def measure(deployments: list[Deployment], pricing: StepPricing) -> dict[str, object]:
    """Simulate several times; return CPU-seconds per simulated second, and the figures of the run."""
    runs = [simulate(deployments, pricing) for _ in range(REPEATS)]
    figures = {name: round(runs[0][name], 3) for name in ("num_steps", "decode_tokens_per_s", "mean_stall_share")}
    return {
        "cpu_s_per_simulated_s": spread([run["cpu_s"] / run["simulated_s"] for run in runs]),
        "cpu_ms_per_step": spread([run["cpu_s"] / run["num_steps"] * 1e3 for run in runs]),
        **figures,
    }


def bound(hot_ids: str) -> dict[str, float]:
    """Return the bound on decode of eight GPUs that share experts and attention evenly, in tokens per second."""
    visits = drawn_visits(gate(hot_ids), NETWORK.num_layers)
    context = np.full(NUM_SEQUENCES, NUM_PROMPT_TOKENS + 1)
    times = least_times(roofline(), Batch(context, np.ones(NUM_SEQUENCES, np.int64)), most_rows=2 * NUM_SEQUENCES)
    table = expert_parallel(roofline(), gate(hot_ids), NUM_GPUS).table
    return {"tokens_per_s": round(throughput_bound(least_work_ns(visits, times, table, range(NUM_GPUS))))}


def main() -> None:
    asked = make_parser(__doc__).parse_args()
    found: dict[str, object] = {"repeats": REPEATS}
    for hot_ids in ("same", "permuted"):
        figures: dict[str, object] = {name: measure(*case) for name, case in cases(hot_ids).items()}
        found[f"hot ids {hot_ids}"] = figures | {"bound of 8 GPUs with attention and experts each": bound(hot_ids)}
    print(json.dumps(found, indent=1))
    save(asked.json, run_record("measured"), found)


if __name__ == "__main__":
    main()
