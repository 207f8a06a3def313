"""Experts move between the workers of `moestro serve --mode async` while requests run: real processes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.running import EXACT, Running, call_admin, free_port, wait_until
from worker.test_async_mode import PACED, ask_many, texts, worker, workers

MIGRATING = (sys.executable, str(Path(__file__).parents[1] / "support" / "migrating_server.py"), "serve")
GROUP = ("--mode", "async", "--attention", "1", "--experts", "2", "--num-redundant-experts", "2", "--no-standby")
KEY = {"Authorization": "Bearer key"}
NUM_REQUESTS = 6


def serving(directory: Path, *flags: str) -> Running:
    command = (*MIGRATING, *flags, "--admin-api-key", "key", "--expert-timeout", "100")
    return Running(command, directory, admin_port=free_port())


def state(server: Running) -> dict:
    return call_admin(server, "GET", "/admin/migration", **KEY).json


def rows(server: Running) -> list:
    """Experts of each worker and layer, of the two workers with experts."""
    return [[sorted({*slots} - {-1}) for slots in layers] for layers in state(server)["logical_of"][:2]]


def start_exchange(server: Running, experts: list[int]) -> None:
    """Each of `experts` goes to the other worker, in every layer."""
    reply = call_admin(server, "POST", "/admin/migration", experts, **KEY)
    assert reply.status == 200, reply.body


def exchanged(now: list, experts: list[int]) -> list:
    moved = set(experts)
    return [[sorted({*own} ^ moved) for own in layers] for layers in now]


@contextmanager
def under_load(server: Running, expected: list[str]) -> Iterator[None]:
    """Ask without a pause, and compare all answers."""
    is_over, found = threading.Event(), []

    def ask() -> None:
        while not is_over.is_set():
            found.append(texts(ask_many(server, NUM_REQUESTS)))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert found
    assert all(each == expected for each in found)


def check_moves(server: Running) -> None:
    """Experts move to the other worker and back, and stay if a destination is killed before the commit."""
    expected = texts(ask_many(server, NUM_REQUESTS))
    before = rows(server)
    experts = [before[0][0][0], before[1][0][0]]
    goal = exchanged(before, experts)
    with under_load(server, expected):
        for target in (goal, before):
            start_exchange(server, experts)
            wait_until(lambda: not state(server)["is_running"])
            after = state(server)
            assert (after["error"], after["num_committed"]) == ("", after["num_layers"])
            assert after["num_bytes"] > 0
            assert rows(server) == target
        killed, stopped = worker(server, "experts", 0), worker(server, "experts", 1)
        stopped.suspend()
        start_exchange(server, experts)
        wait_until(lambda: state(server)["num_bytes"])  # one destination is prepared, the other one never
        killed.kill()
        wait_until(lambda: not state(server)["is_running"])
        stopped.resume()
        assert "expert worker 0 ended before the experts that it loaded were in use" in state(server)["error"]
        assert rows(server) == before
        wait_until(lambda: all(each["phase"] == "serving" for each in workers(server).values()))
        start_exchange(server, experts)
        wait_until(lambda: not state(server)["is_running"])
        assert rows(server) == goal
        killed = worker(server, "experts", 1)
        killed.kill()  # its successor loads what moved to it
        wait_until(lambda: not killed.is_running())
    wait_until(lambda: all(each["phase"] == "serving" for each in workers(server).values()))
    assert texts(ask_many(server, NUM_REQUESTS)) == expected
    assert server.stop() == 0


def test_experts_of_paced_workers_move(tmp_path):
    running = serving(tmp_path, *PACED, *GROUP[2:])
    try:
        check_moves(running)
    finally:
        running.kill()


def test_experts_of_a_network_move_and_all_answers_stay_the_same(short_command, tmp_path):
    running = serving(tmp_path, *short_command[2:], *EXACT, *GROUP)
    try:
        check_moves(running)
    finally:
        running.kill()
