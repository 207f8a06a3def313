"""Compares a queue in the router with engines that get every request at once, at 120 % of their capacity.

    python bench/simulator/router_queue.py [--seeds 3] [--requests 800] [--json FILE]

Everything is simulated: two H20 engines with Qwen3-30B-A3B and 32 sequences each, production router, queue and
schedulers. Requests are turns of chats (`sessions.py`, CHAT); a third is latency-sensitive (urgent), the others
are best effort. Engines schedule first come, first served, as vLLM does by default; the last row has engines that know
the classes. Figures reach the router every 100 ms. Throughput is output tokens over the time from the first arrival to
the last token.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.clock import NS_PER_S
from moestro.sim.results import Results
from moestro.sim.scenario import at_load, make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

LOAD = 1.2
SIGNALS = SignalSettings(
    channels=(
        ChannelSettings(figures=("num_running", "num_waiting", "kv_usage"), channel=ReportChannel.POLLED, delay_ms=5),
    )
)
ROWS = {
    "no queue": {},
    "queue, fcfs": {"queue_policy": "fcfs"},
    "queue, qllm": {"queue_policy": "qllm"},
    "queue, edf": {"queue_policy": "edf"},
    "queue, qllm, 1 waits in an engine": {"queue_policy": "qllm", "queue_waiting": 1},
    "queue, qllm, 4 wait in an engine": {"queue_policy": "qllm", "queue_waiting": 4},
    "queue, qllm, engines order by qllm": {"queue_policy": "qllm", "scheduling_policy": "qllm"},
    "no queue, engines order by qllm": {"scheduling_policy": "qllm"},
}


def policy_of(name: str) -> PolicySettings:
    """Return the combination of policies of one row."""
    return PolicySettings(name=name, route="least_loaded", signals=SIGNALS, **ROWS[name])


def settings_of(num_requests: int, seed: int) -> SimSettings:
    """Return the load and the engines; the rate follows from what they answer without a queue."""
    return SimSettings(
        workload=WorkloadSettings(
            sessions="chat",
            num_requests=num_requests,
            load=LOAD,
            ls_share=1 / 3,
        ),
        engines=SimEngineSettings(count=2, max_num_seqs=32),
        policies=(policy_of("no queue"),),
        seed=seed,
    )


def figures_of(results: Results) -> dict[str, float]:
    """Return the latencies of both classes and the throughput of one run."""
    assert results.is_answered.all(), results.refusals
    ttft_s = (results.first_token_ns - results.arrival_ns) / NS_PER_S
    urgent, other = ttft_s[~results.is_best_effort], ttft_s[results.is_best_effort]
    seconds = (results.last_token_ns.max() - results.arrival_ns.min()) / NS_PER_S
    return {
        "urgent_ttft_mean_s": float(urgent.mean()),
        "urgent_ttft_p99_s": float(np.percentile(urgent, 99)),
        "best_effort_ttft_mean_s": float(other.mean()),
        "best_effort_ttft_max_s": float(other.max()),
        "tokens_per_s": float(results.num_tokens.sum() / seconds),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=800)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    rates = []
    for seed in range(given.seeds):
        settings, saturation = at_load(settings_of(given.requests, seed), Path())
        rates.append(saturation.rate)
        scenario = make_scenario(settings, Path())
        for name in ROWS:
            found[name].append(figures_of(run(scenario, policy_of(name))))
    table = {name: {key: spread([each[key] for each in runs]) for key in runs[0]} for name, runs in found.items()}
    print(
        "| | urgent TTFT mean, s | P99, s | best-effort TTFT mean, s | longest, s | tokens/s |\n"
        "|---|---|---|---|---|---|"
    )
    for name, row in table.items():
        cells = [row[key]["median"] for key in row]
        print(f"| {name} | {cells[0]:.2f} | {cells[1]:.2f} | {cells[2]:.1f} | {cells[3]:.0f} | {cells[4]:,.0f} |")
    base = found["no queue"]
    ratios = {
        name: {
            key: spread([run[key] / without[key] for run, without in zip(found[name], base, strict=True)])
            for key in ("urgent_ttft_mean_s", "urgent_ttft_p99_s", "tokens_per_s")
        }
        for name in ROWS
    }
    print(ratios["queue, qllm"])
    facts = {"seeds": given.seeds, "requests": given.requests, "load": LOAD, "requests_per_s": spread(rates)}
    save(given.json, run_record("simulated"), {**facts, "rows": table, "over_no_queue": ratios})


if __name__ == "__main__":
    main()
