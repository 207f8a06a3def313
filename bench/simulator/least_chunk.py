"""Sweeps the smallest chunk of a prompt that a home plans when it has few rows (`LEAST_CHUNK_SHARE` of the budget).

    python bench/simulator/least_chunk.py [--seeds 3] [--json bench/results/simulator/least_chunk.json]

Everything is simulated: two attention and two expert workers in `async` mode on H100 with `defrag`. The network is
Mixtral 8x7B cut to four layers. Prompts have 500 to 6000 tokens, answers 8 to 64. Arrivals are Poisson, and a step has
2048 tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.experts.expert_table import spread_evenly
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import gpu_named
from moestro.cost.links import NVSWITCH_A100, Machines
from moestro.cost.model import PopularityForm
from moestro.cost.networks import network_named
from moestro.cost.roofline import HostCost, Roofline, RooflineSettings
from moestro.engine import scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup
from moestro.workload.rows import RequestForm, RequestMaker, Rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
NUM_LAYERS, NUM_EXPERTS, NUM_REQUESTS, RATE = 4, 8, 60, 100.0
WHOLE = network_named("mixtral-8x7b")
NETWORK = replace(WHOLE, groups=(replace(WHOLE.groups[0], layers=tuple(range(NUM_LAYERS))),))
BOUNDS = SchedulerSettings(
    num_blocks=20_000, block_size=16, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=2048
)


def simulate(share: float, seed: int) -> dict[str, float]:
    """Serve all requests with one least chunk."""
    scheduler.LEAST_CHUNK_SHARE = share
    popularity = PopularityForm(seed=seed).by_layer(NUM_LAYERS, NUM_EXPERTS)
    cost = Roofline(RooflineSettings(network=NETWORK, gpu=gpu_named("h100"), host=HostCost(step_ns=0, sequence_ns=0)))
    layout = GroupLayout(
        num_homes=2,
        table=spread_evenly(NUM_LAYERS, NUM_EXPERTS, [2, 3], 4),
        machines=Machines(machine_of=(0,) * 4, within=NVSWITCH_A100, across=NVSWITCH_A100),
        gate=PopularityGate(popularity, NETWORK.experts.top_k, seed),
        policy_of=lambda _: make_step_policy("defrag", float("inf")),
    )
    group = WorkerGroup(BOUNDS, layout, lambda _: cost)
    rng = np.random.default_rng(seed)
    prompts, answers = rng.integers(500, 6000, NUM_REQUESTS), rng.integers(8, 64, NUM_REQUESTS)
    arrivals = rng.exponential(1e9 / RATE, NUM_REQUESTS).cumsum().astype(np.int64).tolist()
    maker = RequestMaker(
        Rows(num_prompt_tokens=prompts, num_output_tokens=answers), RequestForm(block_size=16, names_blocks=False)
    )
    first_ns: dict[str, int] = {}
    came_ns, last_ns, index = {}, 0, 0
    while index < NUM_REQUESTS or group.next_ns is not None:
        if index < NUM_REQUESTS and (group.next_ns is None or arrivals[index] <= group.next_ns):
            request, script = maker.make(index, arrivals[index])
            came_ns[request.request_id] = arrivals[index]
            group.add(index % 2, request, script, arrivals[index])
            index += 1
            continue
        last_ns = group.next_ns
        for output in group.turn(last_ns, arrivals[index] if index < NUM_REQUESTS else 1 << 62):
            for sequence in output.sequences:
                first_ns.setdefault(sequence.request.request_id, group.began_ns)
    ttft_ms = [(first_ns[name] - at_ns) / 1e6 for name, at_ns in came_ns.items()]
    return {
        "ttft_ms": statistics.mean(ttft_ms),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "makespan_ms": last_ns / 1e6,
        "plans": sum(seat.rank.scheduler.num_steps for seat in group.seats),
        "expert_gb": sum(device.num_expert_calls for device in group.devices) * NETWORK.expert_bytes / 1e9,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    conditions = run_record("simulated")
    found: dict[str, object] = {"seeds": args.seeds}
    for share in SHARES:
        runs = [simulate(share, seed) for seed in range(args.seeds)]
        found[f"share {share:g}"] = {
            name: [round(f([run[name] for run in runs]), 2) for f in (statistics.mean, min, max)] for name in runs[0]
        }
        print(f"share {share:g}", json.dumps(found[f"share {share:g}"]), flush=True)
        save(args.json, conditions, found)


if __name__ == "__main__":
    main()
