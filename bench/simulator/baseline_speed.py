"""Measures the speed of the baselines of expert parallelism in CPU-seconds per simulated second.

    python bench/simulator/baseline_speed.py --json bench/results/simulator/baseline_speed.json

The systems are those of `moestro repro amoe`: Mixtral 8x7B with multi-query attention on 8 A100, 32 layers, 8 experts,
1,000 sequences that decode from the start. Popularity is exponential with AMoE's rate, and either the same experts are
hot in all layers, or others in each. Tokens per second, stall shares and the bound are simulated, not measured.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.repro.amoe.systems import BASELINES, BLOCK_SIZE, Bed, Popularity, build
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import ANY_ENGINE, RouterSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.lock_step_group import LockStepGroup
from moestro.workload.rows import RequestForm, RequestMaker, Rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

REPEATS = 5
NUM_SEQUENCES, NUM_OUTPUT_TOKENS, NUM_PROMPT_TOKENS = 1000, 100, 100
LENGTHS = (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS / 2, NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS)  # mean context, longest
POPULARITIES: tuple[Popularity, ...] = ("same", "permuted")


def simulate(system: str, popularity: Popularity) -> dict[str, float]:
    """Serve all sequences on one system."""
    built = build(system, Bed(network="mixtral-8x7b-mqa", popularity=popularity, prices="kernels"), LENGTHS, seed=0)
    rows = Rows(
        num_prompt_tokens=np.full(NUM_SEQUENCES, NUM_PROMPT_TOKENS),
        num_output_tokens=np.full(NUM_SEQUENCES, NUM_OUTPUT_TOKENS),
    )
    router = Router(policy_from("round_robin"), RouterSettings(block_size=BLOCK_SIZE))
    for _ in range(built.num_seats):
        router.set_routable(router.add_engine(ANY_ENGINE), routable=True)
    groups = [group for group in built.groups if isinstance(group, LockStepGroup)]
    for seat in (seat for group in groups for seat in group.seats):
        seat.has_prompt_kv = True
    began = time.process_time()
    results = Cluster(groups, router).run(
        RequestMaker(rows, RequestForm(block_size=BLOCK_SIZE)), AtTimes(np.zeros(NUM_SEQUENCES, np.int64))
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
        "bound_tokens_per_s": built.bound(),
    }


def measure(system: str, popularity: Popularity) -> dict[str, object]:
    """Simulate several times; return CPU-seconds per simulated second, and the figures of the run."""
    runs = [simulate(system, popularity) for _ in range(REPEATS)]
    simulated = ("num_steps", "decode_tokens_per_s", "mean_stall_share", "bound_tokens_per_s")
    return {
        "cpu_s_per_simulated_s": spread([run["cpu_s"] / run["simulated_s"] for run in runs]),
        "cpu_ms_per_step": spread([run["cpu_s"] / run["num_steps"] * 1e3 for run in runs]),
        **{name: round(runs[0][name], 3) for name in simulated},
    }


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions = run_record("measured")
    found: dict[str, object] = {"repeats": REPEATS}
    for popularity in POPULARITIES:
        found[f"hot ids {popularity}"] = {name: measure(name, popularity) for name in BASELINES}
    print(json.dumps(found, indent=1))
    save(args.json, conditions, found)


if __name__ == "__main__":
    main()
