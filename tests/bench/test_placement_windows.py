"""`bench/simulator/placement_windows.py` and `placement_dispatch.py`: next windows, shares set anew, first tokens."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from moestro.placement.contract import PLACE_POLICIES

FOLDER = Path(__file__).parents[2] / "bench" / "simulator"


def load_module(name: str) -> ModuleType:
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench = load_module("placement_windows")
dispatch = load_module("placement_dispatch")
FEW = [replace(bed, model=replace(bed.model, num_layers=6)) for bed in bench.BEDS]


@pytest.mark.parametrize("name", ["s=0.4", "s=0.6", bench.MIX])
def test_shares_set_anew_level_the_next_window_and_move_nothing(name):
    rng = np.random.default_rng(0)
    view = FEW[0].view(bench.load_of(name, FEW[0], rng))
    table = PLACE_POLICIES.make("moestro")(view)
    later = bench.loads.with_noise(view.load, rng)
    new = bench.refreshed(view, table, later)
    assert (new.num_copies <= table.num_copies).all()
    assert bench.balance(view, new, later) >= bench.balance(view, table, later) + 0.015


@pytest.mark.parametrize("exponent", [0.2, 0.6])
def test_the_estimate_is_what_devices_of_equal_and_independent_noise_reach(exponent):
    """With equally popular experts and no copies, it is the expectation of independent normal devices."""
    rng = np.random.default_rng(1)
    bed = replace(FEW[0], num_slots=8)
    even = bed.view(bench.loads.from_every_source(np.ones((6, 256)), bed))
    drawn = 1 + 0.1 / np.sqrt(8) * rng.standard_normal((20_000, 32))
    expected = (drawn.mean(axis=1) / drawn.max(axis=1)).mean()
    assert bench.estimate(even, rng) == pytest.approx(expected, abs=0.002)
    skewed = FEW[0].view(bench.load_of(f"s={exponent:g}", FEW[0], rng))
    found = bench.run(FEW[0], f"s={exponent:g}", 0)
    assert found["moestro"]["next"] <= bench.estimate(skewed, rng) + 0.005


@pytest.mark.parametrize("num_ranks", [32, 64])
def test_no_copy_has_more_first_tokens_than_whole_ones_make_it(num_ranks):
    for row in dispatch.figures_of(num_ranks, 1):
        assert row["most"] == row["least_possible"] <= 1.125
        assert row["alike"] == row["copies"]
