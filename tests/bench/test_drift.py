"""`bench/serving/drift.py`: its order of benchmarks, its balance, and the network that follows a record."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from serving import drift
from shared import routed_model
from support.expert_loads import PRICES

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.model.experts.gate_override import GateShape, make_override
from moestro.workload.experts.expert_profile import RoutingTrace, TracedAnswer


def test_each_round_has_all_benchmarks_and_begins_with_another_one_than_the_last():
    orders = [drift.order_of(number) for number in range(20)]
    assert all(sorted(order) == sorted(drift.DOMAINS) for order in orders)
    assert all(order[-1] != after[0] for order, after in itertools.pairwise(orders))
    assert len({tuple(order) for order in orders}) > 3


@pytest.mark.parametrize("seed", range(5))
def test_parts_are_those_of_the_table_and_balance_is_mean_over_largest(seed):
    rng = np.random.default_rng(seed)
    num_layers, num_engines, num_slots = 2, 2, 20
    draws = rng.random((num_engines, num_layers, 32)) - (np.arange(32) % 2 == np.arange(2)[:, None])[:, None]
    rows = draws.argsort(axis=2)[:, :, :num_slots]  # An engine has half of the experts, and copies of four others.
    table = ExpertTable(0, rows.astype(np.int32), 32, np.ones(num_engines, np.bool_))
    shown = {"table_version": 3, "num_experts": 32, "table": rows.swapaxes(0, 1).tolist()}
    placed = drift.table_of(shown | {"shares": table.slot_parts.swapaxes(0, 1).tolist()})
    np.testing.assert_allclose(placed.parts, table.parts)
    visits, steps, found = rng.integers(0, 100, (3, num_engines, num_layers, 32)), (5, 1, 2), drift.Visits()
    for each, num_steps in zip(visits, steps, strict=True):
        none = np.zeros((num_layers, 32))
        found.add(ExpertLoad(each / num_steps, none, none, 1.0), num_steps, placed, PRICES)
    loads = np.einsum("wle,nsle->nlw", table.parts, visits)
    assert found.balance == pytest.approx(loads.mean(axis=2).sum() / loads.max(axis=2).sum())
    assert found.steps == 8
    assert found.step_us > 1e6 * PRICES.token_s * loads.max(axis=2).sum() / 8


def test_tokens_of_a_domain_visit_what_its_answers_visited(tmp_path, monkeypatch):
    rng, size = np.random.default_rng(0), 600
    experts = np.stack([rng.permuted(np.tile(np.arange(16), (8, 1)), axis=1)[:, :4] for _ in range(2 * size)])
    experts[size:] += 16  # The second benchmark visits the other half of the experts.
    answers = tuple(
        TracedAnswer(dataset=name, category="", num_tokens=size, offset=at * size, prompt_tokens=1)
        for at, name in enumerate(("one", "other"))
    )
    trace = RoutingTrace(experts.astype(np.uint8), answers)
    monkeypatch.setattr(routed_model, "read_routing", lambda *_: trace)
    model = routed_model.make_routed_model(tmp_path / "model", tmp_path, ("one", "other"), num_layers=3)
    layers = json.loads((model.directory / "config.json").read_text())["num_hidden_layers"]
    override = make_override(model.gate, GateShape(layers=(0, 1, 2), num_experts=32, num_chosen=4), 0)
    for name, first in (("one", 0), ("other", 16)):
        token_ids = rng.choice(model.tokens[name], 200).astype(np.int32)
        chosen = override.choose(np.arange(200), token_ids)
        assert len(chosen) == layers == 3
        assert (chosen // 16 * 16 == first).all()
