"""Shows what `moestro` trades at overload, and where the long waits of `preble` come from.

    python bench/simulator/overload.py [--seeds 5] [--requests 1000] [--loads tool_agent] [--shares 1.2] [--json FILE]

Everything is simulated: eight H20 engines with Qwen3-30B-A3B, production router and schedulers, agents that reuse
nearly all of their prompts (`coding_agent`) and calls of tools (`tool_agent`). Saturation is the rate at which they
answer under `least_loaded` when all requests arrive at once. `preble` runs with several values of `balance_ratio`, the
ratio of loads from which it moves a request; 15 is that of its published code. `spread of lengths` is the part of the
variance of the logarithms of computed prompt lengths that lies between engines; 0 means that no engine specialises.
`busiest` is the load of the busiest engine over the mean, in request-seconds. The first quarter of the requests is in
no figure.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import msgspec
import numpy as np

from moestro.config.run_record import run_record
from moestro.sim.results import Results
from moestro.sim.scenario import at_load, make_scenario, run
from moestro.sim.settings import SimEngineSettings, SimSettings, WorkloadSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save
from step_groups import LEAD_IN, figures_of, policy_settings

LOADS = ("coding_agent", "tool_agent")
PREBLE = tuple(f"preble:balance_ratio={ratio}" for ratio in (15, 4, 2, 1.25))
POLICIES = {
    0.5: ("moestro", "lmetric", "least_loaded", *PREBLE),
    1.1: ("moestro", "lmetric", "least_loaded"),
    1.2: ("moestro", "lmetric", "least_loaded"),
}
NUM_ENGINES, BLOCK_SIZE = 8, 64


def more_figures(results: Results) -> dict[str, float]:
    """Return how far engines specialise, and how much the busiest one has."""
    rows = np.argsort(results.arrival_ns)[int(LEAD_IN * len(results)) :]
    computed = np.log(np.maximum(results.num_prompt_tokens[rows] - results.num_hit_tokens[rows], 1))
    engine = results.engine[rows]
    within = sum(computed[engine == each].var() * (engine == each).sum() for each in np.unique(engine))
    busy = results.request_seconds()
    return {
        "spread_of_lengths": float(1 - within / (computed.var() * len(rows))),
        "busiest": float(busy.max() / busy.mean()),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--shares", default=",".join(map(str, POLICIES)))
    args = parser.parse_args()
    rounds: list[dict[str, object]] = []
    conditions = run_record("simulated")
    for seed in range(args.seeds):
        for load in args.loads.split(","):
            settings = SimSettings(
                workload=WorkloadSettings(sessions=load, num_requests=args.requests, load=1.0),
                engines=SimEngineSettings(count=NUM_ENGINES, block_size=BLOCK_SIZE),
                policies=(policy_settings("least_loaded", "least_loaded"),),
                seed=seed,
            )
            full, _ = at_load(settings, Path())
            assert full.workload.rate is not None
            for share in map(float, args.shares.split(",")):
                workload = msgspec.structs.replace(full.workload, rate=share * full.workload.rate)
                scenario = make_scenario(msgspec.structs.replace(full, workload=workload), Path())
                for name in POLICIES[share]:
                    results = run(scenario, policy_settings(name, name))
                    cell = {"load": load, "share": share, "policy": name, "seed": seed}
                    rounds.append({**cell, **figures_of(results), **more_figures(results)})
                    print(rounds[-1], file=sys.stderr, flush=True)
        save(args.json, conditions, {"seeds": seed + 1, "requests": args.requests, "rounds": rounds})  # after each seed
    print("| load, share | policy | TTFT mean, ms | P99, ms | hits | spread of lengths | busiest |")
    print("|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((each["load"], each["share"], each["policy"]) for each in rounds):
        runs = [each for each in rounds if (each["load"], each["share"], each["policy"]) == key]
        names = ("ttft_mean_ms", "ttft_p99_ms", "hit_ratio", "spread_of_lengths", "busiest")
        mean, p99, hits, spread, busiest = (statistics.mean(float(str(each[name])) for each in runs) for name in names)
        print(
            f"| {key[0]}, {key[1]:.0%} | `{key[2]}` | {mean:,.0f} | {p99:,.0f} | {hits:.1%} | {spread:.2f} |"
            f" {busiest:.2f} |"
        )


if __name__ == "__main__":
    main()
