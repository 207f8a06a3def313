"""`moestro serve` in modes `ep` and `async` on accelerators: the answers of one device, whichever process is killed.

Each process imitates an accelerator of its own, or they share one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.running import REAL, Running, is_idle, load, wait_until
from worker.test_async_mode import ask_many, texts, worker
from worker.test_async_two_phase import share_in_two_phases

TESTS = Path(__file__).parents[1]
IMITATING = (sys.executable, str(TESTS / "support" / "imitating_server.py"))
# In float32 torch's own kernels give the tokens of any batch.
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-batched-tokens", "512")
PATIENT = ("--engine-timeout", "100", "--expert-timeout", "100")  # the imitation is slow on a busy machine
NUM = 6


@contextmanager
def imitating(checkpoint: Path, directory: Path, num_cards: int, *flags: str) -> Iterator[Running]:
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMITATED_CARDS", str(num_cards))
        running = Running((*IMITATING, str(checkpoint), *FLAGS, *PATIENT, *flags), directory)
    processes = running.processes()
    try:
        yield running
        assert running.stop() == 0
        assert psutil.wait_procs(processes, timeout=30)[1] == []
    finally:
        running.kill()


@pytest.fixture(scope="module")
def expected(short_demo, tmp_path_factory) -> list[str]:
    running = Running((*REAL, str(short_demo), "--device", "cpu", *FLAGS), tmp_path_factory.mktemp("fused"))
    try:
        return texts(ask_many(running, NUM))
    finally:
        running.kill()


@pytest.mark.parametrize("num_cards", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one card", "a card each"])
def test_engines_that_share_their_experts_give_the_answers_of_one_device(num_cards, expected, short_demo, tmp_path):
    with imitating(short_demo, tmp_path, num_cards, "--mode", "ep", "--engines", "2") as running:
        way = "sockets through host memory, because processes share a GPU" if num_cards == 1 else "NCCL"
        assert f"Engines exchange tokens by {way}" in " ".join(running.text.split())
        assert texts(ask_many(running, NUM)) == expected
        old = running.ranks()[1]
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, running, NUM, max_tokens=24)
            # A request that no engine has taken yet would be refused.
            wait_until(lambda: sum(engine["num_running"] for engine in load(running)) == NUM)
            old.kill()
            longer = texts(answers.result())
        assert all(long.startswith(short) for long, short in zip(longer, expected, strict=True))


@pytest.mark.parametrize("num_cards", [pytest.param(1, marks=pytest.mark.slow), 3], ids=["one card", "a card each"])
def test_workers_apart_give_the_answers_of_one_device_while_one_dies(num_cards, expected, short_demo, tmp_path):
    flags = ("--mode", "async", "--attention", "1", "--experts", "2", "--inline-limit", "0")
    with imitating(short_demo, tmp_path, num_cards, *flags) as running:
        way = "gloo through host memory, because processes share a GPU" if num_cards == 1 else "NCCL"
        assert f"large tensors go to 2 of 2 workers by {way}" in running.text
        assert texts(ask_many(running, NUM)) == expected
        wait_until(lambda: share_in_two_phases(running) > 0.5)  # the first ones go inline
        old = worker(running, "experts", 0)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_many, running, NUM)
            wait_until(lambda: not is_idle(running))
            old.kill()
            assert texts(answers.result()) == expected
        wait_until(lambda: worker(running, "experts", 0).pid != old.pid)
        assert texts(ask_many(running, NUM)) == expected
