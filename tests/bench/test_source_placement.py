"""`bench/simulator/source_placement.py`: sources that differ are worth rows between machines, shuffled ones nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "simulator" / "source_placement.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(3))
def test_only_sources_that_differ_gain(bench, seed, monkeypatch):
    monkeypatch.setitem(bench.POLICIES, bench.SMALL, ("moestro",))
    differ, shuffled = (bench.run(bench.SMALL, seed, is_shuffled=each) for each in (False, True))
    assert bench.gains([differ], "moestro")["rows"][0] > 0.1
    assert abs(bench.gains([shuffled], "moestro")["rows"][0]) < 0.01
    assert shuffled["moestro"]["rows_between_nodes"] == pytest.approx(0.5, abs=0.01), "as placed at random"


def test_shuffling_keeps_every_visit(bench):
    mean = bench.from_clusters(bench.SMALL, bench.STICKY, np.random.default_rng(0))
    own, shuffled = (bench.window(mean, np.random.default_rng(1), is_shuffled=each) for each in (False, True))
    assert (own.total == shuffled.total).all()
    shares = shuffled.tokens.sum(axis=(1, 2)) / shuffled.tokens.sum()
    assert shares == pytest.approx(1 / len(shares), abs=0.005)
