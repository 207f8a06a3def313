"""The simulator against a real run of vLLM, which bench/simulator/vllm_fidelity.py names and docs/simulator.md shows.

LLMServingSim, which recorded the run, is itself within -14 % of the mean TTFT and -1.7 % of the mean TPOT.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

spec = importlib.util.spec_from_file_location("vllm_fidelity", ROOT / "bench" / "simulator" / "vllm_fidelity.py")
vllm_fidelity = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vllm_fidelity)
RUN = vllm_fidelity.TRACES / vllm_fidelity.RUN
STORED = json.loads((ROOT / "bench" / "results" / "simulator" / "vllm_fidelity.json").read_text())["figures_ms"]


@pytest.mark.skipif(not RUN.exists(), reason=f"{RUN} is not there: the recorded run")
def test_a_real_run_of_vllm_is_met_as_the_stored_result_says():
    found = vllm_fidelity.compare(vllm_fidelity.TRACES)
    assert abs(found["TPOT, mean"]["error"]) < 0.05
    assert abs(found["TTFT, mean"]["error"]) < 0.20
    for name, row in found.items():
        assert row == pytest.approx(STORED[name], rel=1e-6), name


def test_the_docs_quote_the_stored_result():
    text = (ROOT / "docs" / "simulator.md").read_text()
    for name, row in STORED.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        *values, error = [float(cell.strip(" %").replace(",", "")) for cell in line.split("|")[2:-1]]
        for value, side in zip(values, ("measured", "simulated"), strict=True):
            assert value == pytest.approx(row[side], abs=0.5 if row[side] >= 1000 else 0.05), line
        assert error == pytest.approx(100 * row["error"], abs=0.5 if abs(error) >= 10 else 0.05), line
