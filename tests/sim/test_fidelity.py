"""The simulator against a real run: vLLM 0.19, Qwen3-30B-A3B, two RTX PRO 6000, DP2 x EP2, 300 ShareGPT requests.

No constant is fitted to this run: the GPU's come from profiles of single operations, the host's from A100 and H100 rows
(docs/costs.md says which figures were in view when). LLMServingSim recorded the run (MIT), and its own simulator is
within -14 % of the mean TTFT and -1.7 % of the mean TPOT.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moestro.core.timeline import Timelines
from moestro.core.views import Channel
from moestro.sim.arrivals import AtTimes
from moestro.sim.scenario import Scenario, make_bounds, make_prices, run
from moestro.sim.settings import EngineSettings, PolicySettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, SignalSettings
from moestro.workload.requests import RequestForm, RequestMaker
from moestro.workload.traces import read_trace
from moestro.workload.vllm_run import read_vllm_run

TRACES = Path(__file__).parents[3] / "shared" / "traces"
RUN, HASHES = TRACES / "vllm019_qwen3_30b_a3b_dp2ep2_requests.jsonl.zst", TRACES / "sharegpt_qwen3_hash16.jsonl.zst"

ENGINES = EngineSettings(
    gpu="rtx-pro-6000", network="qwen3-30b-a3b", ep_ranks=2, max_num_seqs=128, max_num_batched_tokens=2048
)
# vLLM's own balancer between data-parallel ranks: counts that are broadcast ten times a second.
BALANCER = PolicySettings(
    route="vllm-0.26",
    signals=SignalSettings(
        channels=(ChannelSettings(figures=("num_waiting", "num_running"), channel=Channel.BROADCAST, period_ms=100),)
    ),
)


def figures(timelines: Timelines) -> dict[str, float]:
    """Milliseconds."""
    ttft, tpot = timelines.ttft_ns / 1e6, timelines.tpot_ns[timelines.num_tokens > 1] / 1e6
    return {
        "TTFT mean": ttft.mean(),
        "TTFT median": np.median(ttft),
        "TTFT p90": np.percentile(ttft, 90),
        "TPOT mean": tpot.mean(),
        "TPOT p99": np.percentile(tpot, 99),
        "E2E mean": timelines.e2e_ns.mean() / 1e6,
    }


@pytest.mark.skipif(not RUN.exists(), reason=f"{RUN} is not there: the recorded run")
def test_a_real_run_of_vllm_is_met():
    recorded, hashed = read_vllm_run(RUN), read_trace(HASHES)
    assert recorded.rows.timestamp_ns is not None
    hashed = hashed.select(np.argsort(np.argsort(recorded.rows.timestamp_ns)))  # in the order in which they were queued
    assert (hashed.num_prompt_tokens == recorded.rows.num_prompt_tokens).all(), "the same requests"
    rows = replace(recorded.rows, hash_ids=hashed.hash_ids, block_size=hashed.block_size)
    scenario = Scenario(
        workload=RequestMaker(rows, RequestForm(block_size=ENGINES.block_size)),
        arrivals=AtTimes(recorded.timelines.arrival_ns),
        bounds=make_bounds(ENGINES),
        prices=make_prices(ENGINES),
        num_groups=ENGINES.count,
        source=RUN.name,
        is_generated=False,
    )
    unused = WorkloadSettings(prompt_tokens=1, output_tokens=1, num_requests=1, rate=1.0)
    results = run(scenario, BALANCER, SimSettings(workload=unused, engines=ENGINES))
    real, simulated = figures(recorded.timelines), figures(results.records().answered)
    errors = {name: simulated[name] / real[name] - 1 for name in real}
    for name, error in errors.items():
        print(f"{name}: measured {real[name]:.1f} ms, simulated {simulated[name]:.1f} ms, {error:+.1%}")
    assert results.is_answered.all()
    assert abs(errors["TPOT mean"]) < 0.05
    assert abs(errors["TTFT mean"]) < 0.20
