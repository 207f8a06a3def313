"""Compares several routers before the same engines with one router: what sharing gains, and what delay and loss cost.

    python bench/simulator/routers.py [--seeds 2] [--requests 400] [--sessions chat] [--json FILE]

Everything is simulated: eight H20 engines with Qwen3-30B-A3B, production routers and schedulers, four routers to which
requests go at random, and the messages of `moestro route --peer` between them. Requests are turns of chats and of
agents (`sessions.py`) at 80 % of the rate that one router reaches. Routers get figures of engines every second,
as from `/metrics`. Each figure is given over that of one router with the same seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.sim.results import Results
from moestro.sim.scenario import at_load, make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

LOAD, NUM_ROUTERS, NUM_ENGINES = 0.8, 4, 8
FIGURES = ("num_running", "num_waiting", "kv_usage", "queued_prefill_tokens")
SIGNALS = SignalSettings(
    channels=(ChannelSettings(figures=FIGURES, channel=ReportChannel.POLLED, delay_ms=5, period_ms=1000),)
)
POLICIES = ("moestro", "lmetric", "session_affinity")
ROWS: dict[str, dict[str, float]] = {
    "one": {},
    "apart": {"routers": NUM_ROUTERS},
    "20 ms": {"routers": NUM_ROUTERS, "router_delay_ms": 20},
    "200 ms": {"routers": NUM_ROUTERS, "router_delay_ms": 200},
    "2 s": {"routers": NUM_ROUTERS, "router_delay_ms": 2000},
    "20 ms, 30 % lost": {"routers": NUM_ROUTERS, "router_delay_ms": 20, "router_loss": 0.3},
}


def settings_of(sessions: str, num_requests: int, seed: int) -> SimSettings:
    """Return the load and the engines; the rate follows from what one router reaches."""
    return SimSettings(
        workload=WorkloadSettings(sessions=sessions, num_requests=num_requests, load=LOAD),
        engines=SimEngineSettings(count=NUM_ENGINES, max_num_seqs=64),
        policies=(PolicySettings(route="moestro", signals=SIGNALS),),
        seed=seed,
    )


def figures_of(results: Results) -> dict[str, float]:
    """Return latencies and hits of one run."""
    assert results.is_answered.all(), results.refusals
    ttft_ns = results.first_token_ns - results.arrival_ns
    return {
        "ttft_mean": float(ttft_ns.mean()),
        "ttft_p99": float(np.percentile(ttft_ns, 99)),
        "e2e_mean": float((results.last_token_ns - results.arrival_ns).mean()),
        "hit_share": float(results.num_hit_tokens.sum() / results.num_prompt_tokens.sum()),
    }


def compare(sessions: str, num_requests: int, num_seeds: int) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return each figure over that of one router, by policy and row."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {row: [] for row in ROWS} for name in POLICIES}
    for seed in range(num_seeds):
        settings, _ = at_load(settings_of(sessions, num_requests, seed), Path())
        scenario = make_scenario(settings, Path())
        for name, rows in found.items():
            one: dict[str, float] = {}
            for row, given in ROWS.items():
                figures = figures_of(run(scenario, PolicySettings(route=name, signals=SIGNALS, **given)))
                one = one or figures
                rows[row].append({key: value / one[key] if one[key] else 1.0 for key, value in figures.items()})
        print(sessions, "seed", seed, "is done", flush=True)
    return {
        name: {row: {key: spread([each[key] for each in runs]) for key in runs[0]} for row, runs in rows.items()}
        for name, rows in found.items()
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--sessions", nargs="+", default=["chat", "coding_agent"])
    given = parser.parse_args()
    record = run_record("simulated")
    found = {sessions: compare(sessions, given.requests, given.seeds) for sessions in given.sessions}
    for sessions, policies in found.items():
        print(
            f"\n{sessions}\n\n| policy | figure | {' | '.join(list(ROWS)[1:])} |\n|---|---|{'---|' * (len(ROWS) - 1)}"
        )
        for name, rows in policies.items():
            for key in ("ttft_mean", "ttft_p99", "hit_share"):
                cells = [f"{rows[row][key]['median']:.2f}" for row in list(ROWS)[1:]]
                print(f"| {name} | {key} | {' | '.join(cells)} |")
    facts = {"seeds": given.seeds, "requests": given.requests, "load": LOAD, "routers": NUM_ROUTERS}
    save(given.json, record, {**facts, "over_one_router": found})


if __name__ == "__main__":
    main()
