"""Compares route policies on coding agents, whose sessions pause for minutes between bursts of tool calls.

    python bench/simulator/session_pauses.py [--seeds 1] [--requests 1000] [--json FILE]

Everything is simulated: eight H20 engines with Qwen3-30B-A3B, production router and schedulers, sessions in closed loop
(`sessions.py`, CODING_AGENT: nine of ten turns follow after a tool call of a second, the others after
minutes). The first quarter of the requests, which finds cold caches, is in no figure. Each policy gets the signals of
`moestro serve`: figures with the output of every step; exact caches with `moestro` alone, as its name states.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.routing.registry import policy_from
from moestro.sim.results import Results
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, SignalSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

POLICIES = (
    "moestro", "lmetric", "llm-d", "llm-d-affinity", "dynamo", "bailian", "miss_ratio", "preble", "cache_aware",
    "session_affinity", "least_loaded",
)  # fmt: skip
EXACT = "moestro, exact caches"
RATES = (0.8, 1.2)  # requests a second of all engines
LEAD_IN = 0.25
NUM_ENGINES, BLOCK_SIZE = 8, 64


def signals_for(policy: str, *, is_exact: bool) -> SignalSettings:
    """Return the figures that a policy reads, with the output of every step."""
    figures = tuple(name for name in policy_from(policy).needs.figures if name != "expert_pressure")
    channels = (ChannelSettings(figures=figures),) if figures else ()
    return SignalSettings(channels=channels, kv_events_delay_ms=0.0 if is_exact else None)


def figures_of(results: Results) -> dict[str, float]:
    """Return latencies, hits and balance of one run, without its beginning."""
    rows = slice(int(LEAD_IN * len(results)), None)
    assert results.is_answered.all(), results.refusals
    ttft_ms = (results.first_token_ns - results.arrival_ns)[rows] / 1e6
    gaps = results.num_tokens[rows].astype(np.int64) - 1
    spans = (results.last_token_ns - results.first_token_ns)[rows] / 1e6
    per_engine = results.request_seconds()
    return {
        "ttft_mean_ms": float(ttft_ms.mean()),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "tpot_mean_ms": float((spans[gaps > 0] / gaps[gaps > 0]).mean()),
        "hit_ratio": float(results.num_hit_tokens[rows].sum() / results.num_prompt_tokens[rows].sum()),
        "imbalance": float(per_engine.max() / per_engine.mean()),
    }


def settings_of(rate: float, num_requests: int, seed: int) -> SimSettings:
    """Return the load and the engines."""
    return SimSettings(
        workload=WorkloadSettings(sessions="coding_agent", num_requests=num_requests, rate=rate),
        engines=SimEngineSettings(count=NUM_ENGINES, block_size=BLOCK_SIZE),
        seed=seed,
    )


def compare(rate: float, num_requests: int, seeds: int) -> dict[str, dict[str, float]]:
    """Return the mean figures of each policy over the seeds."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        scenario = make_scenario(settings_of(rate, num_requests, seed), Path())
        for name in (EXACT, *POLICIES):
            policy = "moestro" if name == EXACT else name
            chosen = PolicySettings(route=policy, signals=signals_for(policy, is_exact=name == EXACT))
            found.setdefault(name, []).append(figures_of(run(scenario, chosen)))
    return {name: {key: statistics.mean(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    result = {}
    for rate in RATES:
        table = compare(rate, args.requests, args.seeds)
        result[f"{rate:g} requests a second"] = table
        print(f"\n{rate:g} requests a second")
        print("| policy | TTFT mean, ms | TTFT P99, ms | TPOT mean, ms | hits | imbalance |\n|---|---|---|---|---|---|")
        for name, each in sorted(table.items(), key=lambda item: item[1]["ttft_mean_ms"]):
            print(
                f"| `{name}` | {each['ttft_mean_ms']:,.0f} | {each['ttft_p99_ms']:,.0f} | {each['tpot_mean_ms']:.1f} |"
                f" {each['hit_ratio']:.1%} | {each['imbalance']:.2f} |"
            )
    save(args.json, run_record("simulated"), {"seeds": args.seeds, "requests": args.requests, "loads": result})


if __name__ == "__main__":
    main()
