"""Sweeps the gap at which a home changes to another copy of an expert, where the hottest experts have two copies.

    python bench/simulator/replica_choice.py [--seeds 5] [--json bench/results/simulator/replica_choice.json]

Everything is simulated: four attention and four expert workers in `async` mode, with production schedulers, flow and
`defrag`, on A100 with NVSwitch. The network is Mixtral 8x7B with multi-query attention, cut to four layers; popularity
is exponential with AMoE's rate. In each layer the four hottest experts have a second copy on the worker with the least
expected load. All requests decode from the start.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.cost.gate import PopularityGate
from moestro.cost.gpus import A100
from moestro.cost.links import NVSWITCH_A100, Machines, two_phase
from moestro.cost.model import AMOE_RATE, PopularityForm
from moestro.cost.networks import network_named
from moestro.cost.roofline import HostCost, Roofline, RooflineSettings
from moestro.engine.settings import SchedulerSettings
from moestro.flow.registry import make_step_policy
from moestro.sim.groups.worker_group import GroupLayout, WorkerGroup
from moestro.workload.rows import RequestForm, RequestMaker, Rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

GAPS = (0, 16, 64, 256, 1024, 1 << 40)  # pairs; the last one never changes, so that second copies are idle
NUM_LAYERS, NUM_EXPERTS, NUM_HOMES, NUM_HOLDERS = 4, 8, 4, 4
NUM_SEQS, NUM_TOKENS = 192, 16  # of each home, and of each request
WHOLE = network_named("mixtral-8x7b-mqa")
NETWORK = replace(WHOLE, groups=(replace(WHOLE.groups[0], layers=tuple(range(NUM_LAYERS))),))
BOUNDS = SchedulerSettings(
    num_blocks=4096, block_size=16, max_model_len=128, max_num_seqs=NUM_SEQS, max_num_batched_tokens=NUM_SEQS
)


def make_table(popularity: np.ndarray) -> ExpertTable:
    """Spread experts, and copy the hottest of each layer to the workers with the least expected load.

    Args:
        popularity: float64[1 or layers, experts].
    """
    num_own = NUM_EXPERTS // NUM_HOLDERS
    logical_of = np.full((NUM_HOMES + NUM_HOLDERS, NUM_LAYERS, num_own + 1), EMPTY, np.int32)
    holders = logical_of[NUM_HOMES:]
    for layer in range(NUM_LAYERS):
        by_expert = popularity[layer % len(popularity)]
        holders[:, layer, :num_own] = np.arange(NUM_EXPERTS).reshape(NUM_HOLDERS, num_own)
        load = by_expert.reshape(NUM_HOLDERS, num_own).sum(axis=1)
        for expert in np.argsort(-by_expert)[:NUM_HOLDERS].tolist():
            may_hold = (holders[:, layer, num_own] == EMPTY) & (holders[:, layer] != expert).all(axis=1)
            holder = int(np.where(may_hold, load, np.inf).argmin())
            if may_hold[holder]:
                holders[holder, layer, num_own] = expert
                load[holder] += by_expert[expert] / 2
                load[expert // num_own] -= by_expert[expert] / 2
    return ExpertTable(0, logical_of, NUM_EXPERTS, np.ones(len(logical_of), np.bool_))


def simulate(hot_ids: str, gap: int, seed: int) -> dict[str, float]:
    """Serve all requests; return tokens a second and the pairs of an expert's call."""
    form = PopularityForm(family="exponential", skew=AMOE_RATE, hot_ids=hot_ids, seed=seed)
    popularity = form.by_layer(NUM_LAYERS, NUM_EXPERTS)
    cost = Roofline(RooflineSettings(network=NETWORK, gpu=A100, host=HostCost(step_ns=0, sequence_ns=0)))
    link = two_phase(NVSWITCH_A100)
    layout = GroupLayout(
        num_homes=NUM_HOMES,
        table=make_table(popularity[0]),
        machines=Machines(machine_of=(0,) * (NUM_HOMES + NUM_HOLDERS), within=link, across=link),
        gate=PopularityGate(popularity, NETWORK.experts.top_k, seed),
        policy_of=lambda _: make_step_policy("defrag", float("inf")),
        switch_gap=gap,
    )
    group = WorkerGroup(BOUNDS, layout, lambda _: cost)
    rng, num = np.random.default_rng(seed), NUM_HOMES * NUM_SEQS
    outputs = rng.integers(NUM_TOKENS // 2, NUM_TOKENS * 3 // 2, num)
    maker = RequestMaker(
        Rows(num_prompt_tokens=np.ones(num, np.int64), num_output_tokens=outputs),
        RequestForm(block_size=16, names_blocks=False),
    )
    for index in range(num):
        group.add(index % NUM_HOMES, *maker.make(index, 0), 0)
    at_ns, tokens = [], []
    while group.next_ns is not None:
        now_ns = group.next_ns
        tokens.append(sum(len(output.sequences) for output in group.turn(now_ns)))
        at_ns.append(now_ns)
    assert sum(tokens) == outputs.sum(), "a token is missing"
    # Up to half of all tokens, every request decodes.
    half = int(np.searchsorted(np.cumsum(tokens), sum(tokens) // 2))
    num_calls = sum(device.num_expert_calls for device in group.devices)
    busy = group.busy_ns[NUM_HOMES:] / max(at_ns)
    return {
        "tokens_per_s": sum(tokens[: half + 1]) / at_ns[half] * 1e9,
        "pairs_per_call": sum(tokens) * NUM_LAYERS * NETWORK.experts.top_k / num_calls,
        "busiest_share": float(busy.max()),
        "least_busy_share": float(busy.min()),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    conditions = run_record("simulated")
    found: dict[str, object] = {"seeds": args.seeds}
    for hot_ids in ("same", "permuted"):
        for gap in GAPS:
            runs = [simulate(hot_ids, gap, seed) for seed in range(args.seeds)]
            figures = {
                name: [round(f([run[name] for run in runs]), 3) for f in (statistics.mean, min, max)]
                for name in runs[0]
            }
            label = "never" if gap == GAPS[-1] else str(gap)
            found[f"hot ids {hot_ids}, gap {label}"] = figures
            print(f"hot ids {hot_ids}, gap {label}", json.dumps(figures), flush=True)
            save(args.json, conditions, found)


if __name__ == "__main__":
    main()
