"""Compares the simulator with a recorded run of vLLM 0.19: Qwen3-30B-A3B, two RTX PRO 6000, DP2 x EP2, ShareGPT.

    python bench/simulator/vllm_fidelity.py --json bench/results/simulator/vllm_fidelity.json [--traces DIR]

Nothing is timed here. LLMServingSim (MIT) recorded the run of 300 requests; the simulator gets the same requests at the
same times. DIR holds the two files named below; the default is ../shared/traces beside the checkout. No constant is
fitted to the run: the GPU's come from profiles of single operations, the host's from A100 and H100 rows (docs/costs.md
says which figures were known when). There is one run of each, so there is no spread.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.clock import Timelines
from moestro.sim.cluster import AtTimes
from moestro.sim.groups.group_setup import make_prices
from moestro.sim.scenario import Scenario, make_bounds, run
from moestro.sim.settings import PolicySettings, SimEngineSettings
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings
from moestro.workload.rows import RequestForm, RequestMaker
from moestro.workload.traces.reading import read_trace
from moestro.workload.traces.request_record import read_vllm_run

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import ROOT
from shared.results import make_parser, save

TRACES = ROOT.parent / "shared" / "traces"
RUN, HASHES = "vllm019_qwen3_30b_a3b_dp2ep2_requests.jsonl.zst", "sharegpt_qwen3_hash16.jsonl.zst"

ENGINES = SimEngineSettings(
    gpu="rtx-pro-6000", network="qwen3-30b-a3b", ep_ranks=2, max_num_seqs=128, max_num_batched_tokens=2048
)
# vLLM's own balancer between data-parallel ranks, whose counts are broadcast ten times a second.
BALANCER = PolicySettings(
    route="vllm-0.26",
    signals=SignalSettings(
        channels=(
            ChannelSettings(figures=("num_waiting", "num_running"), channel=ReportChannel.BROADCAST, period_ms=100),
        )
    ),
)


def figures(timelines: Timelines) -> dict[str, float]:
    """Return the latency figures, ms."""
    ttft, tpot = timelines.ttft_ns / 1e6, timelines.tpot_ns[timelines.num_tokens > 1] / 1e6
    return {
        "TTFT, mean": float(ttft.mean()),
        "TTFT, median": float(np.median(ttft)),
        "TTFT, p90": float(np.percentile(ttft, 90)),
        "TPOT, mean": float(tpot.mean()),
        "TPOT, p99": float(np.percentile(tpot, 99)),
        "E2E, mean": float(timelines.e2e_ns.mean() / 1e6),
    }


def compare(traces: Path) -> dict[str, dict[str, float]]:
    """Return each figure, measured and simulated, and the simulation's error."""
    recorded, hashed = read_vllm_run(traces / RUN), read_trace(traces / HASHES)
    assert recorded.rows.timestamp_ns is not None
    hashed = hashed.select(np.argsort(np.argsort(recorded.rows.timestamp_ns)))  # in the order in which they were queued
    assert (hashed.num_prompt_tokens == recorded.rows.num_prompt_tokens).all(), "not the same requests"
    rows = replace(recorded.rows, hash_ids=hashed.hash_ids, block_size=hashed.block_size)
    scenario = Scenario(
        workload=RequestMaker(rows, RequestForm(block_size=ENGINES.block_size)),
        arrivals=AtTimes(recorded.timelines.arrival_ns),
        engines=ENGINES,
        bounds=make_bounds(ENGINES),
        prices=make_prices(ENGINES),
        source=RUN,
        is_generated=False,
    )
    results = run(scenario, BALANCER)
    assert results.is_answered.all(), "a request was not answered"
    real, simulated = figures(recorded.timelines), figures(results.records().answered)
    return {
        name: {"measured": real[name], "simulated": simulated[name], "error": simulated[name] / real[name] - 1}
        for name in real
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    args = parser.parse_args()
    conditions = run_record("measured by LLMServingSim, and simulated")
    found = compare(args.traces)
    for name, row in found.items():
        print(
            f"{name:13s} measured {row['measured']:9.1f} ms, simulated {row['simulated']:9.1f} ms {row['error']:+7.1%}"
        )
    save(args.json, conditions, {"run": RUN, "prompts": HASHES, "figures_ms": found})


if __name__ == "__main__":
    main()
