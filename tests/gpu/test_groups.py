"""`moestro serve` in modes `ep` and `async` on accelerators: the answers of one device, whoever is killed.

Each process imitates an accelerator of its own, or they share one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.running import REAL, Running
from worker.test_async_mode import ask_many, texts

TESTS = Path(__file__).parents[1]
IMITATING = (sys.executable, str(TESTS / "support" / "imitating_server.py"))
# In float32 torch's own kernels give the tokens of any batch.
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-batched-tokens", "512", "--no-standby")
GROUPS = {"ep": ("--mode", "ep", "--engines", "2"), "async": ("--mode", "async", "--attention", "1", "--experts", "2")}
NUM = 8


@contextmanager
def imitating(directory: Path, num_cards: int, *flags: str) -> Iterator[Running]:
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMITATED_CARDS", str(num_cards))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
        running = Running((*IMITATING, *FLAGS, *flags), directory)
    processes = running.processes()
    try:
        yield running
        assert running.stop() == 0
        assert not any(process.is_running() for process in processes)
    finally:
        running.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[str]:
    running = Running((*REAL, "--device", "cpu", *FLAGS), tmp_path_factory.mktemp("fused"))
    try:
        return texts(ask_many(running, NUM))
    finally:
        running.kill()


@pytest.mark.parametrize("mode", GROUPS)
def test_processes_that_share_a_card_give_the_answers_of_one(mode, expected, tmp_path):
    with imitating(tmp_path, 1, *GROUPS[mode]) as running:
        assert texts(ask_many(running, NUM)) == expected
