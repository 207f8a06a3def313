"""An engine's KV events are hostile: a huge message, one that never ends, a replay that drips, blocks without number.

The stranger is an engine behind the router: it answers HTTP, publishes events and answers replays. One honest engine
stands beside it, and honest clients use the router meanwhile.

    huge      one batch of 60 MB with tokens and hashes that are well formed
    endless   one message of frames that never end
    drip      a replay that sends one batch each half second, while live batches of 1 MB come without a pause
    claims    batches of blocks that are all new, for more blocks than any engine has
    jumps     sequence numbers that go back with each message, at full rate

What must hold in each: no request of the others fails, none waits longer than a few times what it waits undisturbed,
the router's memory grows by a bounded amount, and `moestro:route_kv_complete` of the stranger is 0 where its index was
given up. Each case begins with a fresh router.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from frame import Neighbours, Place, resident_bytes, run
from shared.server import Server

ATTACK_S = 8.0
BLOCK_SIZE = 16
END_OF_REPLAY = b"\xff" * 8
DEMO = Path(__file__).parents[3] / "src" / "moestro" / "assets" / "demo"
ANSWER = b'{"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"x","finish_reason":"stop"}]}'


class _Http(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Keep silent about clients that are gone."""


class Engine:
    """An engine that answers every request at once, and whose KV events are those of `attack`."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.setsockopt(zmq.SNDHWM, 100_000)
        self.events_port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.router = self.context.socket(zmq.ROUTER)
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.http = _Http(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.kept: list[bytes] = []
        self.drips = False
        self.is_over = False
        self.num_sent_bytes = 0
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self._replaying = threading.Thread(target=self._replay, daemon=True)
        self._replaying.start()

    def send(self, seq: int, payload: bytes) -> None:
        """Publish one batch."""
        self.pub.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])
        self.num_sent_bytes += len(payload)

    def close(self) -> None:
        """End all sockets."""
        self.is_over = True
        self._replaying.join()
        self.http.shutdown()
        self.http.server_close()
        self.context.destroy(linger=0)

    def _replay(self) -> None:
        """Answer each request for a replay: with what is kept, or with a batch each half second."""
        last, due_s = None, 0.0
        while not self.is_over:
            if self.router.poll(20):
                last, due_s = self.router.recv_multipart()[0], 0.0
                if not self.drips:
                    for seq, payload in enumerate(self.kept):
                        self.router.send_multipart([last, b"", b"kv", seq.to_bytes(8, "big"), payload])
                    self.router.send_multipart([last, b"", b"", END_OF_REPLAY, b""])
            if self.drips and last is not None and time.monotonic() > due_s:
                due_s = time.monotonic() + 0.5
                self.router.send_multipart([last, b"", b"kv", (0).to_bytes(8, "big"), batch(1, 1)])


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer health checks and the list of models."""
        self._reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}' if "models" in self.path else b"")

    def do_POST(self) -> None:
        """Answer a completion."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._reply(ANSWER)

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def batch(num_blocks: int, seed: int, num_events: int = 1) -> bytes:
    """Encode a batch of stored blocks that no other batch has."""
    rng = random.Random(seed)
    events = []
    for _ in range(num_events):
        tokens = [rng.randrange(70_000) for _ in range(BLOCK_SIZE)] * num_blocks
        hashes = [rng.getrandbits(63) for _ in range(num_blocks)]
        events.append(
            {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens,
             "block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
        )  # fmt: skip
    return msgspec.msgpack.encode([time.time(), events, 0])


@functools.cache
def huge_batch() -> bytes:
    """Encode a batch of 60 MB. This takes seconds, so it happens before the honest clients start."""
    return batch(1_050_000, 1)


async def metrics_of(router: Server) -> str:
    """Return the router's metrics, as soon as it answers within a minute; empty if it does not."""
    for _ in range(12):
        with contextlib.suppress(OSError):
            return (await asyncio.to_thread(router.get, "/metrics")).decode()
    return ""


# --- the cases; each runs in a thread until `until_s`


def huge(engine: Engine, until_s: float) -> None:
    """One message of about 60 MB."""
    engine.kept = [huge_batch()]
    engine.send(0, engine.kept[0])
    time.sleep(max(0.0, until_s - time.monotonic()))


def drip(engine: Engine, until_s: float) -> None:
    """Live batches of about 1 MB, with a gap that the dripping replay does not fill."""
    engine.drips = True
    engine.send(0, batch(1, 1))
    time.sleep(0.5)
    payload, seq = batch(10_000, 2), 5
    while time.monotonic() < until_s:
        engine.send(seq, payload)
        seq += 1
        time.sleep(0.002)


def claims(engine: Engine, until_s: float) -> None:
    """Blocks that are all new."""
    payloads = [batch(2_000, seed) for seed in range(100)]
    hashes, seq = random.Random(0), 0
    while time.monotonic() < until_s:
        tokens = [hashes.randrange(70_000) for _ in range(BLOCK_SIZE)]
        names = [hashes.getrandbits(63) for _ in range(2_000)]
        event = msgspec.msgpack.decode(payloads[seq % 100])[1][0] | {"block_hashes": names}
        event["token_ids"][:BLOCK_SIZE] = tokens
        engine.send(seq, msgspec.msgpack.encode([0.0, [event], 0]))
        seq += 1


def jumps(engine: Engine, until_s: float) -> None:
    """Numbers that go back with each message."""
    payload = batch(4, 1)
    seq = 1 << 62
    while time.monotonic() < until_s:
        for _ in range(200):
            engine.send(seq, payload)
            seq -= 1
        time.sleep(0.01)


def endless(engine: Engine, until_s: float) -> None:
    """Frames of one message, from a publisher that is no libzmq."""
    listener = engine.raw
    part = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
    while time.monotonic() < until_s:
        listener.settimeout(max(0.01, until_s - time.monotonic()))
        with contextlib.suppress(OSError), listener.accept()[0] as peer:
            peer.settimeout(max(0.01, until_s - time.monotonic()))
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"PUB"
            peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            peer.sendall(bytes([4, len(ready)]) + ready)
            time.sleep(0.3)
            while time.monotonic() < until_s:
                peer.sendall(part)
                engine.num_sent_bytes += len(part)


CASES: dict[str, Callable[[Engine, float], None]] = {
    "huge": huge, "endless": endless, "drip": drip, "claims": claims, "jumps": jumps,
}  # fmt: skip


@contextlib.contextmanager
def engine_of(case: str) -> Iterator[Engine]:
    """Run the stranger's engine; in case `endless` its events come from a plain socket."""
    engine = Engine()
    engine.raw = socket.socket()
    engine.raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    engine.raw.bind(("127.0.0.1", 0))
    engine.raw.listen()
    if case == "endless":
        engine.events_port = engine.raw.getsockname()[1]
    try:
        yield engine
    finally:
        engine.raw.close()
        engine.close()


async def one(place: Place, case: str) -> dict[str, object]:
    """Run one case, and return what the neighbours and the router's memory saw of it."""
    with engine_of("honest") as honest, engine_of(case) as stranger:
        urls = [Server(None, f"a={honest.url}"), Server(None, f"b={stranger.url}")]
        flags = (
            "--tokenizer", str(DEMO), "--block-size", str(BLOCK_SIZE), "--route-policy", "round_robin",
            "--kv-events", f"b=tcp://127.0.0.1:{stranger.events_port}",
            "--kv-replay", f"b=tcp://127.0.0.1:{stranger.replay_port}",
        )  # fmt: skip
        with place.routing(*urls, flags=flags, name=case) as router:
            body = {"model": "m", "prompt": "import os\n", "max_tokens": 4}
            huge_batch()
            await asyncio.sleep(2)
            alone = Neighbours(router.url, body=body)
            await alone.for_(3)
            before = resident_bytes(router.process.pid)
            most, until_s = before, time.monotonic() + ATTACK_S
            beside = Neighbours(router.url, body=body)
            async with beside.busy():
                attack = asyncio.create_task(asyncio.to_thread(CASES[case], stranger, until_s))
                while time.monotonic() < until_s + 4:
                    most = max(most, resident_bytes(router.process.pid))
                    await asyncio.sleep(0.05)
                await attack
                text = await metrics_of(router)  # which a router that stands answers late, and its clients with it
                await asyncio.sleep(1)
    complete = [line for line in text.splitlines() if line.startswith("moestro:route_kv_complete{")]
    return {
        "sent_mb": round(stranger.num_sent_bytes / 1e6, 1),
        "undisturbed": alone.figures(),
        "beside": beside.figures(),
        "most_more_mb": round((most - before) / 1e6, 1),
        "kv_complete": complete[0].rpartition(" ")[2] if complete else None,
        "given_up_lines": place.log(case).count("is given up"),
    }


async def attack(place: Place) -> dict[str, object]:
    """Run all cases, or those named in MOESTRO_KV_CASES."""
    cases = os.environ.get("MOESTRO_KV_CASES", " ".join(CASES)).split()
    return {case: await one(place, case) for case in cases}


if __name__ == "__main__":
    run(attack, __doc__)
