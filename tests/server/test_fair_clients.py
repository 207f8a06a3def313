"""Shares of an engine's sequences by client, whatever name of a user its requests have."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from support.running import PATIENCE_S, Running, load, read_to_end, wait_until

NUM_REQUESTS = 12


def post_from(address: str, server: Running, user: str, ends: list[str]) -> None:
    body = json.dumps({"prompt": "a b", "n": 2, "max_tokens": 60, "ignore_eos": True, "user": user}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(server.address, timeout=PATIENCE_S, source_address=(address, 0)) as client:
        client.sendall(head.encode() + body)
        assert read_to_end(client).startswith(b"HTTP/1.1 200 ")
    ends.append(address)


@pytest.mark.parametrize("is_fair", [True, False])
def test_a_client_waits_for_one_place_and_not_behind_all_requests_of_another(real_command, tmp_path, is_fair):
    """The stranger gives each of its requests another user, which changes nothing with the flag."""
    flags = ("--scheduling-policy", "weighted_fair", "--share-policy", "none", "--max-num-seqs", "2")
    server = Running((*real_command, *flags, *(["--users-are-clients"] if is_fair else [])), tmp_path)
    ends: list[str] = []
    try:
        users = [f"{number}" for number in range(NUM_REQUESTS)]
        senders = [
            threading.Thread(target=post_from, args=("127.0.0.2", server, user, ends), daemon=True) for user in users
        ]
        for sender in senders:
            sender.start()
        wait_until(lambda: load(server)[0]["num_waiting"] >= NUM_REQUESTS // 2)
        num_before = len(ends)
        post_from("127.0.0.1", server, "0", ends)
        num_between = len(ends) - 1 - num_before
        for sender in senders:
            sender.join()
        assert len(ends) == NUM_REQUESTS + 1
        assert (num_between <= 4) == is_fair, f"{num_between} requests of the other client came before"
    finally:
        server.kill()
