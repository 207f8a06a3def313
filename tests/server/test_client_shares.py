"""One client's long choices and full queues stop no other client, in the real server, whatever its schedule."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from support.running import PATIENCE_S, REAL, Running, call, load, read_to_end, routing, wait_until

STRANGER, HONEST = "127.0.0.2", "127.0.0.1"
NUM_REQUESTS = 6
LONG = {"prompt": "def f(x):", "n": 16, "max_tokens": 1900, "ignore_eos": True, "stream": True}
PACED = ("--device", "paced:h20", "--paced-arithmetic", "none")
# Steps so long that long requests last until all others have been sent.
SLOWLY_PACED = ("qwen3-30b-a3b", *PACED, "--pace-dilation", "2")
SCHEDULES = {
    "fcfs": (),
    "sjf": ("--scheduling-policy", "sjf"),
    "qllm": ("--scheduling-policy", "qllm", "--batch-policy", "qllm"),
    "preemptive": ("--mode", "preemptive"),
}


def send(server: Running, address: str, body: dict, *headers: str) -> socket.socket:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        + "".join(f"{header}\r\n" for header in headers)
        + f"Content-Length: {len(data)}\r\n\r\n"
    )
    client = socket.create_connection(server.address, timeout=PATIENCE_S, source_address=(address, 0))
    client.sendall(head.encode() + data)
    return client


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_small_request_is_answered_while_all_sequences_of_another_client_run(tmp_path, name):
    server = Running((*REAL, *PACED, "--max-num-seqs", "8", *SCHEDULES[name]), tmp_path)
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(NUM_REQUESTS):
                stack.enter_context(send(server, STRANGER, LONG))
            wait_until(lambda: load(server)[0]["num_waiting"] >= 8)
            for _ in range(3):
                with send(server, HONEST, {"prompt": "import os", "max_tokens": 4}) as honest:
                    assert read_to_end(honest).startswith(b"HTTP/1.1 200 ")
            now = load(server)[0]
            assert now["num_waiting"] + now["num_running"] >= 16, "the stranger's choices have ended before"
    finally:
        server.kill()


def answer_of(client: socket.socket) -> tuple[int, bytes]:
    with client:
        answer = read_to_end(client)
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("flags", [(), ("--share-policy", "none", "--scheduling-policy", "sjf")])
def test_a_client_that_fills_the_queue_gives_up_places_to_others(tmp_path, flags):
    long = {"prompt": "def f(x):", "max_tokens": 250, "ignore_eos": True}
    small = ("--max-num-seqs", "2", "--max-num-queued-reqs", "4")
    server = Running((*REAL, *SLOWLY_PACED, *small, *flags), tmp_path)
    try:
        strangers = [send(server, STRANGER, long) for _ in range(2)]
        wait_until(lambda: load(server)[0]["num_running"] == 2)
        for count in range(1, 5):  # one after the other, so that the last one is the newest
            strangers.append(send(server, STRANGER, long))
            wait_until(lambda count=count: load(server)[0]["num_waiting"] == count)
        assert answer_of(send(server, STRANGER, long))[0] == 503, "the queue is full"
        status, _ = answer_of(send(server, HONEST, {"prompt": "import os", "max_tokens": 2}))
        assert status == 200
        answers = [answer_of(stranger) for stranger in strangers]
        assert [status for status, _ in answers] == [200, 200, 200, 200, 200, 503], "the newest one gives way"
        assert b"gave way to another client" in answers[-1][1]
        assert b"\r\nRetry-After: 1\r\n" in answers[-1][1]
        assert b'"code":"queue_full"' in answers[-1][1]
    finally:
        server.kill()


def test_choices_that_give_way_are_generated_later(real_command, tmp_path):
    """One request with more choices than places is answered whole, whatever gives way meanwhile."""
    many = {"prompt": "def f(x):", "n": 12, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    server = Running((*real_command, "--max-num-seqs", "16", "--max-num-queued-reqs", "4"), tmp_path)
    try:
        with send(server, STRANGER, many) as stranger:
            for _ in range(6):
                assert answer_of(send(server, HONEST, {"prompt": "import os", "max_tokens": 2}))[0] == 200
            answer = read_to_end(stranger)
        choices = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]
        assert [choice["index"] for choice in choices] == list(range(12))
        assert len({choice["text"] for choice in choices}) == 1
    finally:
        server.kill()


@pytest.mark.parametrize(("flag", "counts_apart"), [("--router-api-key", True), ("--api-key", False)])
def test_clients_behind_a_trusted_router_count_apart(tmp_path, flag, counts_apart):
    """The stranger names another client in each request, which changes nothing."""
    long = {"prompt": "def f(x):", "max_tokens": 250, "ignore_eos": True}
    key = "of-the-router"
    small = ("--max-num-seqs", "2", "--max-num-queued-reqs", "4")
    server = Running((*REAL, *SLOWLY_PACED, *small, flag, key), tmp_path)

    def count(name: str) -> int:
        return call(server, "GET", "/load", Authorization=f"Bearer {key}").json["engines"][0][name]

    def stranger(number: int) -> socket.socket:
        return send(router, STRANGER, long, f"X-Moestro-Client: {number}")

    try:
        assert call(server, "GET", "/load").status == 401
        with routing(server, tmp_path, "--engine-api-key", key) as router:
            strangers = [stranger(number) for number in range(2)]
            wait_until(lambda: count("num_running") == 2)
            strangers += [stranger(number) for number in range(2, 6)]
            wait_until(lambda: count("num_waiting") == 4)
            assert answer_of(stranger(6))[0] == 503, "a name that a client gives itself counts for nothing"
            status, _ = answer_of(send(router, HONEST, {"prompt": "import os", "max_tokens": 2}))
            assert status == (200 if counts_apart else 503)
            for each in strangers:
                each.close()
    finally:
        server.kill()
