"""More than can be served: refused at once, with the time to come back, and no other client is worse off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections import Counter
from typing import ClassVar

import aiohttp
import pytest
from support.fake_rank import SLOW
from support.running import (
    Running,
    call,
    complete,
    is_idle,
    load,
    metrics,
    open_stream,
    read_to_end,
    stream_request,
    wait_until,
)

from moestro.errors import BusyError
from moestro.text.thread_pool import PrepareThreads
from moestro.web.access import Access
from moestro.web.bodies import Bodies, BodiesFullError

CONFINED = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-num-queued-reqs", "4")


@pytest.fixture
def start(fake_command, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> Running:
            server = Running((*fake_command, *flags), tmp_path)
            stack.callback(server.kill)
            return server

        yield start


async def flood(url: str, rate: float, seconds: float) -> Counter:
    """Open load, whatever comes back: (status, error code, Retry-After) -> how often."""
    body = {"prompt": [40, 41, 42, 43], "max_tokens": 20, "ignore_eos": True}
    seen: Counter = Counter()

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            error = (await reply.json()).get("error", {})
            seen[reply.status, error.get("code"), reply.headers.get("Retry-After")] += 1

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for _ in range(int(rate * seconds)):
            tasks.create_task(ask(session))
            await asyncio.sleep(1 / rate)
    return seen


def test_under_ten_times_the_load_all_are_served_or_refused_with_the_time_to_come_back(start):
    server = start(*CONFINED)
    # 2 at a time, 20 tokens each, 2 ms a token: 50 requests a second at the very most.
    seen = asyncio.run(flood(server.url, rate=500, seconds=3))
    served, refused = seen.pop((200, None, None)), seen.pop((503, "queue_full", "1"))
    assert not seen
    assert served >= 20
    assert refused >= 1000
    wait_until(lambda: is_idle(server))
    assert complete(server, max_tokens=2).status == 200
    figures = metrics(server)
    assert figures['moestro:requests_refused_total{reason="queue_full"}'] == refused
    assert figures['vllm:request_success_total{engine="0",finished_reason="length"}'] == served + 1


def test_a_refusal_does_not_wait_for_the_engines_step_and_a_long_step_is_no_hang(start):
    server = start(*CONFINED, "--engine-timeout", "2")
    slow = threading.Thread(target=complete, args=(server,), kwargs={"priority": SLOW, "max_tokens": 1})
    slow.start()
    wait_until(lambda: call(server, "GET", "/load").json["server_load"] == 1)
    queued = [threading.Thread(target=complete, args=(server,), kwargs={"max_tokens": 1}) for _ in range(3)]
    for thread in queued:
        thread.start()
    wait_until(lambda: call(server, "GET", "/load").json["server_load"] == 4)
    reply = complete(server)
    assert (reply.status, reply.headers["retry-after"], reply.json["error"]["code"]) == (503, "1", "queue_full")
    unread = call(server, "POST", "/v1/completions", b"no JSON at all")
    assert (unread.status, unread.json["error"]["code"]) == (503, "queue_full")  # refusing costs no decoding
    assert slow.is_alive()  # the engine is in the step in which it was
    for thread in (slow, *queued):
        thread.join()
    assert complete(server, max_tokens=1).status == 200
    assert "it restarts in" not in server.text


def test_a_thousand_requests_at_once_are_all_answered(start):
    """As `vllm bench serve --num-prompts 1000` sends them, its default."""
    server = start()
    body = {"prompt": "def foo(x):\n    return x\n" * 100, "max_tokens": 1}

    async def ask_all() -> Counter:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask() -> int:
                async with session.post(f"{server.url}/v1/completions", json=body) as reply:
                    await reply.read()
                    return reply.status

            return Counter(await asyncio.gather(*(ask() for _ in range(1000))))

    assert asyncio.run(ask_all()) == {200: 1000}


def test_threads_refuse_work_beyond_their_bound():
    async def test() -> None:
        threads, gate = PrepareThreads(max_waiting=2, num_threads=1), threading.Event()
        waiting = [asyncio.create_task(threads.run(gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError) as refused:
            await threads.run(gate.wait)
        assert (refused.value.http_status, refused.value.retry_after_s) == (503, 1)
        gate.set()
        assert await asyncio.gather(*waiting) == [True] * 3
        assert await threads.run(lambda: 7) == 7
        threads.close()

    asyncio.run(test())


class Posted:
    """As much of an HTTP request as its body needs."""

    content_type = "application/json"
    headers: ClassVar[dict[str, str]] = {}
    remote = "127.0.0.1"

    def __init__(self, *parts: bytes) -> None:
        self._parts = iter(parts)
        self.content = self

    async def readany(self) -> bytes:
        return next(self._parts, b"")

    def __getitem__(self, _key: object) -> Access:
        return Access.of([])


def test_bodies_hold_a_bounded_number_of_bytes_and_small_ones_always_get_in():
    async def test() -> None:
        bodies, half = Bodies(max_held_bytes=3 << 19), b" " * (640 << 10)
        for _ in range(2):
            async with bodies.reading(Posted(half)) as large, bodies.reading(Posted(b"{", b"}")) as small:
                assert (large, small) == (half, b"{}")
                with pytest.raises(BodiesFullError):
                    async with bodies.reading(Posted(b"{", half)):
                        pass

    asyncio.run(test())


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def swarms() -> dict[str, tuple[str, bytes, str]]:
    """Path, body and error code by name: 300 MB, and a second to build."""
    return {
        "token ids": (COMPLETIONS, b'{"prompt": [' + b"1," * 16_000_000 + b"1]}", "context_length_exceeded"),
        "prompts": (COMPLETIONS, b'{"prompt": [' + b'"a",' * 8_000_000 + b'"a"]}', "too_many_elements"),
        "biases": (
            COMPLETIONS,
            b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}}",
            "too_many_elements",
        ),
        "messages": (
            CHAT,
            b'{"messages": [' + b'{"role":"user","content":"x"},' * 1_000_000 + b"1]}",
            "too_many_elements",
        ),
        "tools": (CHAT, b'{"messages": [], "tools": [' + b"[]," * 8_000_000 + b"1]}", "too_many_elements"),
        "fields": (CHAT, b"{" + b",".join(b'"%d":1' % i for i in range(2_000_000)) + b"}", "too_many_elements"),
        "repeated fields": (COMPLETIONS, b'{"prompt": "x"' + b',"stop":["a"]' * 2_000_000 + b"}", "too_many_elements"),
        "null fields": (CHAT, b'{"messages": []' + b',"a":null' * 3_300_000 + b"}", "too_many_elements"),
        "ids of one hash": (
            COMPLETIONS,
            b'{"prompt": "x", "stop_token_ids": ['
            + b",".join(b"%d" % ((2**61 - 1) * i) for i in range(40_000))
            + b"]}",
            "invalid_value",
        ),
        "long numbers": (COMPLETIONS, b'{"prompt": [' + (b"1" * 4000 + b",") * 8000 + b"1]}", "invalid_value"),
        "text": (COMPLETIONS, b'{"prompt": "' + b"\\n" * 16_000_000 + b'"}', "context_length_exceeded"),
    }


def test_a_body_of_the_largest_size_does_not_hold_up_the_others(start):
    """The server works 0.25 s at most between two answers. Decoded without a count, the tools take 5 s."""
    server = start()
    for name, (path, body, code) in swarms().items():
        replies, longest = [], 0.0
        posting = threading.Thread(target=lambda: replies.append(call(server, "POST", path, body)))  # noqa: B023
        posting.start()
        while posting.is_alive():
            since = server.cpu_s()
            assert call(server, "GET", "/health").status == 200
            longest = max(longest, server.cpu_s() - since)
        assert (replies[0].status, replies[0].json["error"]["code"]) == (400, code), name
        assert longest < 1.5, f"{name} held up the others for {longest:.2f} s"


def test_one_connection_too_many_is_refused_and_the_others_are_served(start):
    server = start("--max-connections", "8")
    streams = [open_stream(server, max_tokens=4000) for _ in range(8)]
    assert refusal(server).startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in refusal(server)
    assert json.loads(refusal(server).partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
    for each in streams:
        each.close()
    wait_until(lambda: not refusal(server))
    assert call(server, "GET", "/health").status == 200


def refusal(server: Running) -> bytes:
    """What a connection hears that says nothing."""
    with socket.create_connection(server.address) as connection:
        connection.settimeout(0.2)
        try:
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except TimeoutError:
            return b""


def test_a_client_that_does_not_read_is_cut_off_and_its_sequences_are_freed(start):
    server = start("--write-timeout", "1")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(server.address)
        options = {"include_usage": True, "continuous_usage_stats": True}
        lazy.sendall(stream_request(prompt=["a b c d e"] * 16, max_tokens=4000, stream_options=options))
        wait_until(lambda: load(server)[0]["num_running"] == 16)
        assert complete(server, max_tokens=5).status == 200
        wait_until(lambda: is_idle(server))
        assert "a client left its answer unread" in server.text
        with contextlib.suppress(ConnectionResetError):
            assert b"data: [DONE]" not in read_to_end(lazy)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server):
    """Against the real network: 150 clients, each gone at a moment of its own."""
    rng = random.Random(0)
    for _ in range(150):
        leave_early(server, rng)
    wait_until(lambda: is_idle(server))
    assert complete(server, max_tokens=2).status == 200


def leave_early(server: Running, rng: random.Random) -> None:
    """In the middle of the headers or the body, while it is prepared, waits, runs, or has just ended."""
    request = stream_request(prompt="def f(x):\n" * rng.choice([1, 30]), max_tokens=60, stream=rng.random() < 0.7)
    with socket.create_connection(server.address) as connection:
        connection.sendall(request[: rng.choice([20, len(request) - 5, len(request), len(request), len(request)])])
        connection.settimeout(rng.choice([0.0005, 0.005, 0.02, 0.05]))
        with contextlib.suppress(TimeoutError):
            for _ in range(rng.choice([1, 1, 5, 50])):
                connection.recv(rng.choice([10, 4096]))
