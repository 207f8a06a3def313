"""Strangers at the ports where an engine publishes its KV events: messages without end, replays, idle connections.

`moestro serve` publishes with a replay port. Honest clients send small requests meanwhile, and a router's socket
requests one replay.

    endless   messages of frames that never end, at both ports
    replays   4 strangers that request the whole buffer again and again, and read it
    silent    200 strangers that request it 21 times each, and read nothing
    idle      2,000 connections that send nothing, or half a greeting

What must hold in each: no honest request fails, none waits longer than a few times what it waits alone, the engine's
memory and its open files grow by a bounded amount, and the replay comes. Each case begins with a fresh server.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from frame import Neighbours, Place, resident_bytes, run
from shared.server import free_port

ATTACK_S = 10.0
REPLAY_S = 30.0  # limit of the honest replay
NUM_PROMPTS = 300
OUTPUT_TOKENS = 8
DEMO = Path(__file__).parents[3] / "src" / "moestro" / "assets" / "demo"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
REQUEST = b"\x01\x00\x00\x08" + bytes(8)
END = b"\xff" * 8


@dataclass
class Attack:
    """The ports under attack, and the connections that it holds.

    Attributes:
        events, replay: ports of the engine.
        is_over: set when the attack ends.
        held: what closes with it.
    """

    events: int
    replay: int
    is_over: threading.Event = field(default_factory=threading.Event)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def connect(self, port: int, kind: bytes, receive_bytes: int = 0) -> socket.socket:
        """Return a connection after its handshake."""
        peer = socket.socket()
        if receive_bytes:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        peer.settimeout(2)
        peer.connect(("127.0.0.1", port))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        peer.sendall(GREETING + bytes([4, len(ready)]) + ready)
        return peer


def endless(it: Attack) -> None:
    """Frames of 4,000 bytes, as many as the engine takes; a new connection where it ends one."""
    part = (b"\x03" + struct.pack(">Q", 4000) + bytes(4000)) * 16
    while not it.is_over.is_set():
        for port, kind in ((it.events, b"SUB"), (it.replay, b"DEALER")):
            with contextlib.suppress(OSError), it.connect(port, kind) as peer:
                time.sleep(0.1)
                until_s = time.monotonic() + ATTACK_S / 4
                while time.monotonic() < until_s and not it.is_over.is_set():
                    peer.sendall(part)


def replays(it: Attack) -> None:
    """Four strangers that request replays and read them."""

    def one() -> None:
        while not it.is_over.is_set():
            with contextlib.suppress(OSError), it.connect(it.replay, b"DEALER") as peer:
                while not it.is_over.is_set():
                    peer.sendall(REQUEST)
                    peer.recv(1 << 20)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def silent(it: Attack) -> None:
    """Two hundred strangers that request replays and read nothing."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            peer = it.held.enter_context(it.connect(it.replay, b"DEALER", receive_bytes=4096))
            time.sleep(0.005)
            peer.sendall(REQUEST * 21)
    it.is_over.wait()


def idle(it: Attack) -> None:
    """Two thousand connections, half of which send half a greeting."""
    for number in range(2000):
        with contextlib.suppress(OSError):
            peer = it.held.enter_context(socket.socket())
            peer.settimeout(0.2)
            peer.connect(("127.0.0.1", it.events if number % 4 < 2 else it.replay))
            peer.sendall(GREETING[:33] if number % 2 else b"")
    it.is_over.wait()


CASES: dict[str, Callable[[Attack], None]] = {
    "endless": endless, "replays": replays, "silent": silent, "idle": idle,
}  # fmt: skip


def replay_s(port: int) -> float | None:
    """Return how long a whole replay takes to come, or None if it does not."""
    began_s = time.monotonic()
    context = zmq.Context()
    reader = context.socket(zmq.DEALER)
    reader.connect(f"tcp://127.0.0.1:{port}")
    try:
        reader.send_multipart([b"", bytes(8)])
        while (left_s := began_s + REPLAY_S - time.monotonic()) > 0:
            if reader.poll(1000 * left_s) and END in reader.recv_multipart():
                return round(time.monotonic() - began_s, 3)
    finally:
        context.destroy(linger=0)
    return None


async def fill(url: str) -> None:
    """Send prompts that differ, so that there is something to replay."""
    async with aiohttp.ClientSession() as session:
        for number in range(NUM_PROMPTS):
            body = {"prompt": f"{number} " + f"word{number} " * 120, "max_tokens": 1}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()


def figures_of(neighbours: Neighbours, seconds: float) -> dict[str, object]:
    """Return the figures of honest clients, with their tokens per second."""
    tokens = len(neighbours.seconds) * OUTPUT_TOKENS
    return {**neighbours.figures(), "tokens_per_s": round(tokens / seconds, 1)}


async def one(place: Place, case: str) -> dict[str, object]:
    """Run one case, and return what the neighbours and the engine's memory saw of it."""
    it = Attack(free_port(), free_port())
    config = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv",'
        f' "endpoint": "tcp://127.0.0.1:{it.events}", "replay_endpoint": "tcp://127.0.0.1:{it.replay}"}}'
    )
    with place.serving(str(DEMO), "--block-size", "16", "--kv-events-config", config, name=case) as server:
        [engine] = server.engines()
        await fill(server.url)
        body = {"prompt": "import os\n", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        alone = Neighbours(server.url, body=body)
        await alone.for_(ATTACK_S)
        replay_alone_s = await asyncio.to_thread(replay_s, it.replay)
        before, num_files = resident_bytes(engine.pid), engine.num_fds()
        most, most_files, until_s = before, num_files, time.monotonic() + ATTACK_S
        beside = Neighbours(server.url, body=body)
        stranger = asyncio.create_task(asyncio.to_thread(CASES[case], it))
        async with beside.busy():
            replay = asyncio.create_task(asyncio.to_thread(replay_s, it.replay))
            while time.monotonic() < until_s:
                most, most_files = max(most, resident_bytes(engine.pid)), max(most_files, engine.num_fds())
                await asyncio.sleep(0.05)
        seen = figures_of(beside, ATTACK_S)
        replay_beside_s = await replay
        it.is_over.set()
        await stranger
        it.held.close()
        await asyncio.sleep(3)
        after = resident_bytes(engine.pid)
    return {
        "alone": figures_of(alone, ATTACK_S) | {"replay_s": replay_alone_s},
        "beside": seen | {"replay_s": replay_beside_s},
        "most_more_mb": round((most - before) / 1e6, 1),
        "more_mb_afterwards": round((after - before) / 1e6, 1),
        "most_more_files": most_files - num_files,
    }


async def attack(place: Place) -> dict[str, object]:
    """Run all cases, or those of --only."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    return {case: await one(place, case) for case in place.only or CASES}


if __name__ == "__main__":
    run(attack, __doc__)
