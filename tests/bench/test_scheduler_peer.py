"""The load of `bench/micro/scheduler_peer.py` keeps its batch full, and notices where it does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "bench" / "micro" / "scheduler_peer.py"
_SPEC = importlib.util.spec_from_file_location(_PATH.stem, _PATH)
bench = sys.modules[_PATH.stem] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)


@pytest.mark.parametrize(("num_sequences", "answer"), [(1, 0), (6, 0), (1, 8), (6, 8), (6, 20)])
def test_as_many_sequences_run_in_each_step(num_sequences: int, answer: int):
    load = bench.Load(num_sequences, answer, 50)
    assert bench.step_us(bench.OwnScheduler(load), load) > 0


def test_a_sequence_that_is_not_of_the_load_is_noticed():
    scheduler = bench.OwnScheduler(bench.Load(4, 8, 50))
    scheduler.add("one more", [1, 2, 3], 2)
    with pytest.raises(AssertionError, match="has 4 of 3 sequences"):
        bench.step_us(scheduler, bench.Load(3, 8, 50))
