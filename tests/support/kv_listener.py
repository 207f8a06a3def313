"""A listener to the KV events of one engine of `moestro serve`, and the names of its blocks."""

from __future__ import annotations

import contextlib
import socket
from functools import cache
from pathlib import Path

import numpy as np
import zmq
from support.fake_publisher import Sink
from support.running import wait_until

from moestro.core.hashing import hash_blocks, hash_key, split_hashes
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.text.tokenizer import Tokenizer
from moestro.wire.kv_names import NamingRules

DEMO = Path(__file__).parents[2] / "src" / "moestro" / "assets" / "demo"
MODEL = "moestro-demo"


def free_ports(num_engines: int) -> tuple[int, int]:
    """Two ports, behind each of which as many are free: below those that the system gives to connections of others."""
    for base in np.random.default_rng().permutation(np.arange(20_000, 32_000, 2 * num_engines)).tolist():
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + 2 * num_engines):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return base, base + num_engines
    raise AssertionError("no port is free")


class Listener:
    """A subscriber of one rank, and the router's books of what it hears."""

    def __init__(self, events_port: int, replay_port: int, model: str = MODEL) -> None:
        self.context = zmq.Context()
        self.context.linger = 0
        self.events, self.replay = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.events.subscribe(b"kv")
        self.events.connect(f"tcp://127.0.0.1:{events_port}")
        self.replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.sink = Sink()
        naming = NamingRules(model=model, block_size=16)
        settings = KvFeedSettings(engine=0, name="e", naming=naming, can_replay=True)
        self.feed = KvFeed(self.sink, settings, lambda _kind, _text: None)
        self.feed.stream.connected(0)

    def ask(self) -> None:
        """What the feed wants replayed."""
        start = self.feed.stream.request()
        if start is not None:
            self.replay.send_multipart([b"", start.to_bytes(8, "big")])
            while not self.feed.replayed(self.replay.recv_multipart(), 0):
                pass
            self.feed.work(0)

    def hear(self) -> None:
        while self.events.poll(0):
            frames = self.events.recv_multipart()
            assert frames[0] == b"kv"
            self.feed.live(frames, 0)
            self.feed.work(0)
        self.ask()

    def lose(self) -> int:
        """Let what was published pass unheard."""
        wait_until(lambda: self.events.poll(0))
        num_lost = 0
        while self.events.poll(100):
            self.events.recv_multipart()
            num_lost += 1
        return num_lost

    @property
    def held(self) -> set[bytes]:
        self.hear()
        return self.sink.held.get(0, set())

    def close(self) -> None:
        self.context.destroy(linger=0)


def names(text: str, salt: str | None = None, model: str = MODEL) -> list[bytes]:
    """As a router names the blocks of a prompt."""
    ids = _tokenizer().encode(text, add_special_tokens=True)
    return split_hashes(hash_blocks(hash_key(model, None, salt), np.array(ids, np.int32), 16))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def publishing_config(ports: tuple[int, int]) -> str:
    """The value of --kv-events-config for publishers at these ports and those after them."""
    return (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv",'
        f' "endpoint": "tcp://127.0.0.1:{ports[0]}", "replay_endpoint": "tcp://127.0.0.1:{ports[1]}"}}'
    )
