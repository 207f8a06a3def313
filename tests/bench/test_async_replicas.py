"""`bench/serving/async_replicas.py`: its systems, and gains against the same gate and round."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from serving import async_replicas as bench


def row(system: str, gate: str, seed: int, rate: float, *, is_valid: bool = True) -> dict[str, object]:
    itl = {"mean": 1.0, "p99": 2.0}
    figures = {"tokens_per_s": rate, "itl_ms": itl, "expert_balance": 0.9, "is_valid": is_valid}
    return {"system": system, "gate": gate, "seed": seed, **figures}


def test_gains_are_against_experts_in_order_of_the_same_gate_and_round():
    rows = [row("in_order", "same", 1, 100.0), row("in_order", "same", 2, 50.0), row("in_order", "permuted", 1, 10.0)]
    rows += [row("eplb", "same", 1, 150.0), row("eplb", "same", 2, 60.0, is_valid=False)]
    rows += [row("eplb", "permuted", 1, 9.0)]
    found = bench.summary(rows)
    assert found["same, eplb"]["throughput_over_in_order"] == {"median": 1.35, "min": 1.2, "max": 1.5}
    assert found["permuted, eplb"]["throughput_over_in_order"]["median"] == pytest.approx(0.9)
    assert found["same, eplb"]["num_invalid"] == 1


@pytest.mark.parametrize("gate", bench.GATE_FLAGS)
def test_only_systems_that_place_have_further_slots(gate):
    for name, policy in bench.POLICIES.items():
        flags = bench.system_of(name, gate, 96.0, 3, 768).flags
        assert ("--num-redundant-experts" in flags) is (policy is not None)
        assert ("--gate-override" in flags) is (gate == "permuted")
        assert flags[flags.index("--seed") + 1] == "3"
        assert flags[flags.index("--max-num-seqs") + 1] == "192", "all users fit on four engines"
