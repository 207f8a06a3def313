"""One client's long choices stop no other client, in the real server with a paced device, whatever its schedule."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from support.running import PATIENCE_S, REAL, Running, load, read_to_end, wait_until

STRANGER, HONEST = "127.0.0.2", "127.0.0.1"
NUM_REQUESTS = 6
LONG = {"prompt": "def f(x):", "n": 16, "max_tokens": 1900, "ignore_eos": True, "stream": True}
PACED = ("--device", "paced:h20", "--paced-arithmetic", "none")
SCHEDULES = {
    "fcfs": (),
    "sjf": ("--scheduling-policy", "sjf"),
    "qllm": ("--scheduling-policy", "qllm", "--batch-policy", "qllm"),
    "preemptive": ("--mode", "preemptive"),
}


def send(server: Running, address: str, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
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
