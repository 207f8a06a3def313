"""The comparison of simulator and server: what it derives from runs that were measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from simulator import sim_fidelity as bench


def test_an_engine_is_busy_while_any_request_is_in_flight(tmp_path):
    rows = [(0.0, 1000), (0.5, 200), (0.9, 600), (3.0, 500)]  # the third outlasts the first; then nothing is there
    lines = ["arrival_s,e2e_ms", *(f"{arrival},{e2e}" for arrival, e2e in reversed(rows))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    assert bench.busy_s(tmp_path / "rows.csv") == pytest.approx(1.5 + 0.5)


def test_drift_is_the_median_of_all_points(tmp_path):
    def table(*ns):
        return json.dumps({kind: [{"ns": each} for each in ns] for kind in ("prefill", "short_chunks", "decode")})

    (tmp_path / "table-3.json").write_text(table(100, 200, 400))
    (tmp_path / "after-3.json").write_text(table(100, 220, 800))
    assert bench.drift(tmp_path, 3) == pytest.approx(1.1)


def test_time_that_the_host_steals_and_the_benchs_own_is_not_that_of_other_processes():
    before = bench.Usage(at_s=10.0, rank_s=1.0, mine_s=5.0, all_s=20.0, stolen_s=1.0)
    after = bench.Usage(at_s=20.0, rank_s=7.0, mine_s=21.0, all_s=37.0, stolen_s=1.5)
    found = before.until(after)
    assert found == pytest.approx({"rank_cpu_s": 6.0, "others_share": 0.1, "steal_share": 0.05})


def test_figures_are_compared_by_policy_and_over_seeds():
    def spreads(ttft, tpot):
        figures = {"ttft_ms": ttft, "tpot_ms": tpot}
        return {name: dict.fromkeys(("mean", "p50", "p99"), value) for name, value in figures.items()}

    runs = [bench.compare(spreads(100, 10), spreads(simulated, 10), api_ms=2) for simulated in (78, 108)]
    found = bench.over_seeds(runs)["ttft_ms mean"]
    assert found["error"] == pytest.approx(-0.05)
    assert runs[0]["tpot_ms mean"]["error"] == 0
    assert (found["least_error"], found["largest_error"]) == pytest.approx((-0.2, 0.1))
    by_policy = {"one": runs[0], "two": runs[1]}
    assert bench.ranking(by_policy, "ttft_ms mean", "simulated") == ["one", "two"]


def test_lengths_are_those_of_the_seed_and_mostly_short(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        bench.write_lengths(tmp_path / name, seed)
    first, again, other = ((tmp_path / name).read_text() for name in "abc")
    assert first == again != other
    prompts = np.array([json.loads(line)["input_length"] for line in first.splitlines()])
    assert len(prompts) == bench.NUM_REQUESTS
    assert 0.15 < (prompts >= bench.LONG_PROMPTS[0]).mean() < 0.35
