"""`bench/simulator/placement.py`: its loads, its judgement of plans, and the budgets that it sweeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.contract import PLACE_POLICIES, PlaceView

SCRIPT = Path(__file__).parents[2] / "bench" / "simulator" / "placement.py"


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench = load_module(SCRIPT)
loads = bench.loads
MODEL = loads.Model(num_layers=3, num_experts=16, hidden=64, width=32, weight_bytes=2, num_groups=4)
BED = loads.Bed(MODEL, 4, 6, 2)


@pytest.fixture
def obedient(monkeypatch):
    """A policy that moves as many experts as the limits allow, in place of `static`."""

    def move(view: PlaceView) -> ExpertTable:
        most = 12 if view.limits.max_bytes is None else view.limits.max_bytes // view.prices.expert_bytes
        logical_of = view.table.logical_of.copy()
        for i in range(min(most, 12) // 2):  # swap experts that have one copy each, of the second and third device
            layer, slot = i % 3, i // 3
            pair = logical_of[1, layer, slot + 2], logical_of[2, layer, slot]
            logical_of[2, layer, slot], logical_of[1, layer, slot + 2] = pair
        return ExpertTable(view.table.version + 1, logical_of, view.table.num_experts, view.devices.is_alive)

    monkeypatch.setattr(PLACE_POLICIES, "make", lambda _: move)
    return move


def test_zipf_loads_have_their_exponent_and_other_hot_experts_in_each_layer():
    model = loads.Model(num_layers=40, num_experts=128, hidden=1, width=1, weight_bytes=1)
    popularity = loads.zipf(model, 0.8, np.random.default_rng(0))
    ordered = np.log(-np.sort(-popularity, axis=1)).mean(axis=0)
    slope = np.polyfit(np.log(np.arange(1, 65)), ordered[:64], 1)[0]
    assert slope == pytest.approx(-0.8, abs=0.05)
    assert len(set(popularity.argmax(axis=1).tolist())) > 20


def test_a_drift_swaps_its_share_of_experts():
    popularity = np.arange(1.0, 41.0)[None]
    later = loads.drifted(popularity, 0.0, 0.1, np.random.default_rng(0))
    assert sorted(later[0].tolist()) == popularity[0].tolist()
    assert (later != popularity).sum() == 4


def test_nodes_that_stick_to_their_tasks_send_other_mixes():
    alike, apart = (loads.from_clusters(BED, sticky, np.random.default_rng(0)).tokens for sticky in (0.0, 1.0))
    np.testing.assert_allclose(alike[0], alike[3])
    np.testing.assert_allclose(apart[0], apart[1])  # the same node
    assert not np.allclose(apart[0], apart[3])
    assert apart.sum(axis=2) == pytest.approx(loads.ROWS_PER_SOURCE)


def test_no_plan_exceeds_the_bound():
    for seed in range(10):
        load = loads.from_every_source(loads.zipf(MODEL, 1.2, np.random.default_rng(seed)), BED)
        view = BED.view(load)
        found = bench.judge(bench.Scene(view), PLACE_POLICIES.make("eplb")(view))
        most = bench.bound(view)
        assert found["balance_sglang"] <= most["balance_sglang"] + 1e-9
        assert found["least_layer"] <= most["least_layer"] + 1e-9


def test_a_dead_device_keeps_no_source_and_a_placement_that_uses_it_lacks_experts():
    view = BED.view(loads.from_every_source(loads.zipf(MODEL, 0.6, np.random.default_rng(0)), BED))
    dead = loads.kill(view, 1)
    assert dead.load.tokens[1].sum() == 0.0
    found = bench.judge(bench.Scene(dead), dead.table)
    assert found == {"coverage": (16 - 6) / 16 + 2 / 16}  # experts 6 and 7 have a second copy
    whole = bench.judge(bench.Scene(dead), PLACE_POLICIES.make("eplb:hierarchy=never")(dead))
    assert whole["coverage"] == 1.0
    assert whole["empty"] >= 0


def test_policies_that_keep_to_limits_are_swept_over_budgets(obedient):
    trial = bench.drift_trials([BED], "static", range(1))[0]
    results = bench.Results()
    results.run(trial, ["static"], 1)
    moved = {row["policy"]: row["moved"][0] for row in results.rows() if "moved" in row}
    assert moved["static"] == pytest.approx(12 / 72, abs=1e-5)
    tried = [budget for budget in bench.BUDGETS if budget < 12 / 72]
    assert list(moved) == ["static", *(f"static, {budget:.0%} may move" for budget in tried)]
    for budget in tried:
        assert moved[f"static, {budget:.0%} may move"] <= budget


def test_policies_without_limits_are_not_swept():
    trial = bench.drift_trials([BED], "eplb", range(1))[1]
    results = bench.Results()
    results.run(trial, ["eplb", "static"], 1)
    assert [row["policy"] for row in results.rows()] == ["(upper bound)", "eplb", "static"]


def test_a_policy_that_cannot_take_a_case_is_left_out_with_its_reason():
    uneven = loads.Bed(
        loads.Model(num_layers=1, num_experts=16, hidden=1, width=1, weight_bytes=1, num_groups=3), 4, 6, 2
    )
    results = bench.Results()
    results.run(bench.fresh_trials([uneven], [0.6], range(1))[0], ["eplb:hierarchy=always"], 1)
    assert "3 groups of experts cannot be kept on 2 nodes" in next(iter(results.skipped.values()))
