"""The cost model beside published measurements, of which bench/simulator/cost_checks.py makes docs/costs.md."""

import importlib.util
import json
from pathlib import Path

import pytest

from moestro.cost.roofline import VLLM_HOST

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "calibration"

spec = importlib.util.spec_from_file_location("cost_checks", ROOT / "bench" / "simulator" / "cost_checks.py")
cost_checks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cost_checks)
NETWORKS, ROWS = cost_checks.published()
COMPARED = cost_checks.compare(ROWS, NETWORKS)

# (GPU, network, beginning of the name): the largest error that is tolerated. Known to be far off: reasoning traces,
# whose tokens hit fewer experts than independent ones do, and a TTFT that a server adds its own time to.
TOLERANCES = {
    ("a100", "qwen3-30b-a3b", "TPOT"): 0.08,
    ("a100", "qwen3-30b-a3b", "TTFT"): 0.20,
    ("h100", "qwen3-30b-a3b", "LM Arena"): 0.15,
    ("h100", "qwen3-30b-a3b", "GPQA"): 0.25,
    ("h100", "qwen3-8b", "LM Arena"): 0.15,
    ("h100", "gpt-oss-20b", "GPQA"): 0.10,
    ("h100", "gpt-oss-120b", "GPQA"): 0.05,
    ("h20", "qwen3-30b-a3b", ""): 0.12,
    ("rtx-pro-6000", "qwen3-30b-a3b", "steady"): 0.05,
    ("a100", "mixtral-8x7b-int8", ""): 0.08,
    ("a100", "mixtral-8x7b", "one expert"): 0.20,
}


def tolerance(row) -> float:
    found = [
        bound
        for (gpu, network, name), bound in TOLERANCES.items()
        if (gpu, network) == (row["gpu"], row["network"]) and row["name"].startswith(name)
    ]
    assert len(found) == 1, row
    return found[0]


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: f"{row['gpu']} {row['network']} {row['name']}")
def test_a_published_time_is_priced_within_its_tolerance(row):
    assert abs(row["error"]) <= tolerance(row)


def test_mean_errors():
    assert cost_checks.mean_error([row for row in COMPARED if row["use"] == "fit"]) < 0.06
    assert cost_checks.mean_error([row for row in COMPARED if row["use"] == "check"]) < 0.08


def test_host_constants_are_those_that_the_a100_and_h100_rows_give():
    used = [row for row in ROWS if row["use"] == "fit"]
    assert {row["gpu"] for row in used} == {"a100", "h100"}
    fit = cost_checks.fit_host(used, NETWORKS)
    assert VLLM_HOST.step_ns / 1e6 == round(fit["step_ms"], 1)
    assert VLLM_HOST.sequence_ns / 1e3 == round(fit["sequence_us"])


def test_the_stored_result_and_the_page_are_up_to_date():
    stored = json.loads((ROOT / "bench" / "results" / "simulator" / "cost_checks.json").read_text())
    assert stored["rows"] == COMPARED, "run bench/simulator/cost_checks.py again"
    page = (ROOT / "docs" / "costs.md").read_text()
    assert cost_checks.markdown(stored) in page, "run bench/simulator/cost_checks.py with --docs again"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there: tables of single operations")
def test_tables_of_single_operations_are_met():
    bounds = {"experts": 0.13, "gemm": 0.20, "decode attention": 0.24, "prefill attention": 0.20}
    grids = cost_checks.compare_grids()
    assert len(grids) == 14
    for name, errors in grids.items():
        bound = bounds[name.split(", ")[1]]
        assert errors["num_rows"] >= 20
        assert errors["mean_error"] <= bound, f"{name}: {errors}"
