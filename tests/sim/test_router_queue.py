"""The production queue in front of a simulated router."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestro.errors import ConfigError
from moestro.sim.results import Results
from moestro.sim.scenario import make_scenario, run
from moestro.sim.settings import PolicySettings, SimEngineSettings, SimSettings, WorkloadSettings
from moestro.sim.signals import ChannelSettings, ReportChannel, SignalSettings

FIGURES = ("num_running", "num_waiting", "kv_usage")
POLLED = SignalSettings(channels=(ChannelSettings(figures=FIGURES, channel=ReportChannel.POLLED),))
WORKLOAD = WorkloadSettings(
    prompt_tokens=400, output_tokens=60, num_requests=240, rate=200.0, arrivals="poisson", ls_share=0.3
)
SETTINGS = SimSettings(workload=WORKLOAD, engines=SimEngineSettings(count=2, max_num_seqs=8))


def results_of(**policy) -> Results:
    # Answers of equal length end together: with fewer waiting, steps would lack what the router sends next.
    combination = PolicySettings(route="least_loaded", signals=POLLED, queue_waiting=4, **policy)
    results = run(make_scenario(SETTINGS, Path()), combination)
    assert results.is_answered.all()
    return results


def urgent_ttft_s(results: Results) -> float:
    return float((results.first_token_ns - results.arrival_ns)[~results.is_best_effort].mean() / 1e9)


def seconds(results: Results) -> float:
    return float(results.last_token_ns.max() / 1e9)


def test_urgent_requests_wait_for_fewer_others_and_throughput_stays():
    without, ordered = results_of(), results_of(queue_policy="qllm")
    assert urgent_ttft_s(ordered) < 0.6 * urgent_ttft_s(without)
    assert seconds(ordered) < 1.03 * seconds(without)


def test_the_queue_in_order_of_arrival_changes_little():
    without, fcfs = results_of(), results_of(queue_policy="fcfs")
    assert urgent_ttft_s(fcfs) < 1.1 * urgent_ttft_s(without)
    assert seconds(fcfs) < 1.03 * seconds(without)


@pytest.mark.parametrize("policy", ["weighted_fair", "prefill_aware", "edf", "priority", "sjf"])
def test_each_request_is_answered_under_each_policy(policy):
    assert results_of(queue_policy=policy).num_tokens.sum() == 240 * 60


def test_a_queue_without_figures_is_refused():
    with pytest.raises(ConfigError, match=r"queue_policy needs kv_usage, num_running, num_waiting"):
        run(make_scenario(SETTINGS, Path()), PolicySettings(queue_policy="fcfs"))
