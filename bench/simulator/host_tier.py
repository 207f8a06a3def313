"""Simulates host memory below the prefix cache for coding agents, whose next prompt repeats nearly all of their last.

    python bench/simulator/host_tier.py [--requests 200] [--seeds 1] [--json FILE]

Everything is simulated: one H100 engine with Qwen3-30B-A3B, production scheduler and host tier, sessions in closed loop
(`sessions.py`, CODING_AGENT: pauses of a second after tool calls, of minutes between bursts). The KV memory
of the engine holds the longest prompt once. Live KV is the mean over time of the contexts of the sessions that have
begun and not ended, as a multiple of that memory; more sessions a second make it larger. Host memory is none, as much
again, and four times as much. Copies are priced at the peak of PCIe 5.0, and run beside the steps: a step
waits for the blocks that it reads. The first quarter of the requests is in no figure.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.cost.networks import network_named
from moestro.sim.results import Results
from moestro.sim.scenario import Scenario, make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.workload.rows import Int64s

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

RATES, SIZES = (0.1, 0.2, 0.3), (0, 1, 4)  # requests a second; host memory over KV memory
NUM_BLOCKS, BLOCK_SIZE, LEAD_IN = 2400, 64, 0.25


def scenario_of(num_requests: int, rate: float, seed: int, size: float) -> Scenario:
    """Make the load of one engine with `size` times its KV memory on the host."""
    workload = WorkloadSettings(sessions="coding_agent", num_requests=num_requests, rate=rate)
    engines = SimEngineSettings(gpu="h100", count=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    block_bytes = network_named(engines.network).kv_bytes_per_token * BLOCK_SIZE
    engines = replace(engines, kv_offloading_size=size * NUM_BLOCKS * block_bytes / (1 << 30))
    return make_scenario(SimSettings(workload=workload, engines=engines, seed=seed), Path())


def live_tokens(session_of: Int64s, results: Results) -> float:
    """Mean over time of the contexts of the sessions that have begun and not ended."""
    sessions: dict[int, list[int]] = {}
    for row, session in enumerate(session_of.tolist()):
        sessions.setdefault(session, []).append(row)
    token_ns, end_ns = 0.0, int(results.last_token_ns.max())
    for rows in sessions.values():
        ends = [*results.arrival_ns[rows][1:], results.last_token_ns[rows].max()]
        sizes = results.num_prompt_tokens[rows] + results.num_tokens[rows]
        token_ns += float(((np.array(ends) - results.arrival_ns[rows]) * sizes).sum())
    return token_ns / (end_ns - int(results.arrival_ns.min()))


def figures_of(results: Results) -> dict[str, float]:
    """Return what a run is judged by, without its beginning."""
    rows = np.argsort(results.arrival_ns)[int(LEAD_IN * len(results)) :]
    ttft_ms = (results.first_token_ns - results.arrival_ns)[rows] / 1e6
    seconds = (results.last_token_ns[rows].max() - results.arrival_ns[rows].min()) / 1e9
    num_prompt, host = results.num_prompt_tokens[rows].sum(), results.num_host_tokens[rows].sum()
    return {
        "ttft_mean_ms": float(ttft_ms.mean()),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "device_hits": float((results.num_hit_tokens[rows].sum() - host) / num_prompt),
        "host_hits": float(host / num_prompt),
        "tokens_per_s": float(results.num_tokens[rows].sum() / seconds),
    }


def measure(num_requests: int, seed: int) -> dict[str, dict[str, float]]:
    """Figures of each rate and size of the host tier."""
    found, policy = {}, PolicySettings(route="moestro")
    for rate in RATES:
        for size in SIZES:
            scenario = scenario_of(num_requests, rate, seed, size)
            results = run(scenario, policy)
            live = live_tokens(scenario.workload.rows.session, results) / (NUM_BLOCKS * BLOCK_SIZE)
            found[f"{rate:g} requests/s, host {size} x"] = {"live_kv": live, **figures_of(results)}
            print(rate, size, found[f"{rate:g} requests/s, host {size} x"], file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    rounds = [measure(args.requests, seed) for seed in range(args.seeds)]
    means = {
        name: {key: statistics.mean(each[name][key] for each in rounds) for key in rounds[0][name]}
        for name in rounds[0]
    }
    print(
        "| load, host memory | live KV | TTFT mean, ms | P99, ms | device hits | host hits |\n|---|---|---|---|---|---|"
    )
    for name, each in means.items():
        print(
            f"| {name} | {each['live_kv']:.1f} x | {each['ttft_mean_ms']:,.0f} | {each['ttft_p99_ms']:,.0f} |"
            f" {each['device_hits']:.1%} | {each['host_hits']:.1%} |"
        )
    save(
        args.json,
        run_record("simulated"),
        {"seeds": args.seeds, "requests": args.requests, "cases": means, "rounds": rounds},
    )


if __name__ == "__main__":
    main()
