"""`moestro serve --mode async` with every tensor on a channel of its own, while workers die and stand still."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.running import EXACT, Running, call, is_idle, metrics, wait_until
from worker.test_async_mode import ask_many, names, texts, worker

NUM = 12
GROUP = ("--mode", "async", "--attention", "2", "--experts", "2", "--inline-limit", "0")


@pytest.fixture(scope="module")
def group(short_command, tmp_path_factory) -> Iterator[Running]:
    """Two homes and two workers with experts, whose large and small tensors all go in two phases."""
    running = Running((*short_command, *EXACT, *GROUP), tmp_path_factory.mktemp("group"))
    yield running
    processes = running.processes()
    try:
        assert running.stop() == 0
        assert psutil.wait_procs(processes, timeout=30)[1] == []
    finally:
        running.kill()


@pytest.fixture(scope="module")
def fused(short_server) -> list[str]:
    return texts(ask_many(short_server, NUM))


def share_in_two_phases(running: Running) -> float:
    """The share of the messages of all links whose tensors went on a channel."""
    values = metrics(running)
    totals = [
        sum(value for name, value in values.items() if name.startswith(f"moestro:link_{kind}_total{{"))
        for kind in ("two_phase_messages", "messages")
    ]
    return totals[0] / max(totals[1], 1)


def test_tensors_travel_in_two_phases_and_answers_are_those_of_fused_mode(group, fused):
    assert texts(ask_many(group, NUM)) == fused
    assert texts(ask_many(group, NUM)) == fused
    wait_until(lambda: share_in_two_phases(group) > 0.5)  # the first ones go inline
    wait_until(lambda: is_idle(group))
    before = {process: sum(process.cpu_times()[:2]) for process in group.workers().values()}
    time.sleep(3)
    assert all(sum(process.cpu_times()[:2]) - spent < 0.03 * 3 for process, spent in before.items())


@pytest.mark.parametrize("victim", ["experts", "attention"])
def test_no_answer_differs_when_a_worker_is_killed_during_a_transfer(group, fused, victim):
    wait_until(lambda: len(names(group)) == 4)
    wait_until(lambda: call(group, "GET", "/health").status == 200)
    old = worker(group, victim, 1)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_many, group, NUM)
        wait_until(lambda: not is_idle(group))
        old.kill()
        assert texts(answers.result()) == fused
    wait_until(lambda: worker(group, victim, 1).pid != old.pid)


@pytest.mark.parametrize("victim", ["experts", "attention"])
def test_no_answer_differs_when_a_worker_stands_still_for_a_while(group, fused, victim):
    wait_until(lambda: len(names(group)) == 4)
    old = worker(group, victim, 0)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_many, group, NUM)
        wait_until(lambda: not is_idle(group))
        old.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # shorter than --expert-timeout, which ends the process
        old.send_signal(signal.SIGCONT)
        assert texts(answers.result()) == fused
    assert share_in_two_phases(group) > 0.5
