"""KV events over real sockets: what engines publish is what the router goes by."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from gateway.rig import FakeEngine, Rig, looped, rig, settings_of
from support.fake_publisher import FakePublisher, Prompt, payload, removed

from moestro.errors import ConfigError
from moestro.gateway.engines.kv_subscriber import KvSubscription
from moestro.gateway.part_settings import KvSource, KvSources
from moestro.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "src" / "moestro" / "assets" / "demo"
BLOCK_SIZE = 4  # of the fake publisher
TEXT = "def fibonacci(number):\n    return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)\n"


class Published:
    """The sockets of one publishing process."""

    def __init__(self, events_port: int = 0, replay_port: int = 0) -> None:
        self.cache = FakePublisher(np.random.default_rng(events_port), arrays=False, int_hashes=True, num_kept=100)
        self._context = zmq.Context()
        self._context.linger = 0
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.bind(f"tcp://127.0.0.1:{events_port or '*'}")
        self._router.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.events_port, self.replay_port = _port(self._pub), _port(self._router)
        self.num_requests_seen = 0
        self._server = asyncio.create_task(self._serve())

    def store(self, token_ids: list[int], *, lose: bool = False) -> None:
        """Hold a prompt and say so; with `lose` the message never arrives."""
        self.cache.compute(Prompt(tuple(token_ids)))
        self.cache.publish()
        if not lose:
            self.send(*self.cache.published[-1])

    def send(self, seq: int, body: bytes) -> None:
        self._pub.send_multipart([b"kv", seq.to_bytes(8, "big"), body])

    def die(self) -> None:
        self._server.cancel()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            with contextlib.suppress(zmq.Again):
                client, _, start = self._router.recv_multipart(zmq.NOBLOCK)
                self.num_requests_seen += 1
                for seq, body in self.cache.buffer:
                    if seq >= int.from_bytes(start, "big"):
                        self._router.send_multipart([client, b"", b"kv", seq.to_bytes(8, "big"), body])
                self._router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])
            await asyncio.sleep(0.002)


def _port(socket: zmq.Socket) -> int:
    return int(socket.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2])


class Publishers:
    """Those of a test, closed with it."""

    def __init__(self, *names: str) -> None:
        self._all = {name: Published() for name in names}

    def __getitem__(self, name: str) -> Published:
        return self._all[name]

    def restart(self, name: str) -> None:
        old = self._all[name]
        old.die()
        self._all[name] = Published(old.events_port, old.replay_port)

    @property
    def settings(self) -> dict:
        return {
            "tokenizer": DEMO,
            "block_size": BLOCK_SIZE,
            "route_policy": "lmetric",
            "kv_events": tuple(f"{name}=tcp://127.0.0.1:{it.events_port}" for name, it in self._all.items()),
            "kv_replay": tuple(f"{name}=tcp://*:{it.replay_port}" for name, it in self._all.items()),
        }

    def close(self) -> None:
        for published in self._all.values():
            published.die()


@contextlib.contextmanager
def published_by(*names: str) -> Iterator[Publishers]:
    publishers = Publishers(*names)
    try:
        yield publishers
    finally:
        publishers.close()


def subscription(it: Rig, name: str) -> KvSubscription | None:
    assert it.app.kv_events is not None
    return {engine.name: subscription for engine, subscription in it.app.kv_events}.get(name)


async def until_known(it: Rig, name: str, num_blocks: int) -> None:
    """Until so many blocks of an engine are known, and nothing is doubtful."""

    def is_known() -> bool:
        found = subscription(it, name)
        return found is not None and found.feed.num_blocks == num_blocks and found.feed.stream.is_certain

    await it.until(is_known)


async def ask(it: Rig, text: str = TEXT) -> str:
    """The name of the engine that a prompt went to."""
    answer = await it.call("/v1/completions", {"model": "m", "prompt": text})
    return answer.headers["x-moestro-engine"]


def tokens(text: str = TEXT) -> list[int]:
    return Tokenizer(DEMO).encode(text, add_special_tokens=True)


@looped
async def test_a_prompt_goes_where_its_blocks_are_reported():
    with published_by("a", "b") as published:
        published["b"].store(tokens())  # before the router is there
        async with rig(FakeEngine("a"), FakeEngine("b"), **published.settings) as it:
            await until_known(it, "b", len(tokens()) // BLOCK_SIZE)
            await until_known(it, "a", 0)
            assert await ask(it) == "b"
            published["a"].store(tokens("import os\n" * 20))
            await until_known(it, "a", len(tokens("import os\n" * 20)) // BLOCK_SIZE)
            assert await ask(it, "import os\n" * 20) == "a"


@looped
async def test_a_message_that_was_lost_is_requested():
    with published_by("a", "b") as published:
        async with rig(FakeEngine("a"), FakeEngine("b"), **published.settings) as it:
            await until_known(it, "b", 0)
            published["b"].store(tokens()[:8])
            published["b"].store(tokens()[:16], lose=True)
            published["b"].store(tokens())
            await until_known(it, "b", len(tokens()) // BLOCK_SIZE)
            counts = subscription(it, "b").feed.counts.stream
            assert (counts.gaps, counts.lost) == (1, 0)
            assert await ask(it) == "b"


@looped
async def test_another_process_at_the_same_place_holds_nothing_of_the_old_ones():
    with published_by("a", "b") as published:
        async with rig(FakeEngine("a"), FakeEngine("b"), **published.settings) as it:
            await until_known(it, "b", 0)
            published["b"].store(tokens())
            await until_known(it, "b", len(tokens()) // BLOCK_SIZE)
            published.restart("b")
            published["b"].store(tokens("import os\n" * 9))
            published["a"].store(tokens()[: 2 * BLOCK_SIZE])
            await until_known(it, "b", len(tokens("import os\n" * 9)) // BLOCK_SIZE)
            await until_known(it, "a", 2)
            assert subscription(it, "b").feed.counts.stream.restarts == 1
            assert await ask(it) == "a"


@looped
async def test_what_the_router_forgot_of_a_process_that_lives_is_reported_again():
    with published_by("a", "b") as published:
        async with rig(FakeEngine("a"), FakeEngine("b"), **published.settings) as it:
            await until_known(it, "a", 0)
            published["b"].store(tokens())
            await until_known(it, "b", len(tokens()) // BLOCK_SIZE)
            fleet, router = it.app.shared.fleet, it.app.shared.fleet.router
            fleet.lost(it.engine("b"), "it hung up once", time.monotonic_ns())
            assert router.index_bytes == 0
            await it.until(lambda: router.index_bytes > 0)
            await it.until_up("b")
            assert await ask(it) == "b"


@looped
async def test_figures_tell_of_events_and_of_what_is_missing():
    with published_by("a") as published:
        async with rig(FakeEngine("a"), **published.settings) as it:
            await until_known(it, "a", 0)
            published["a"].store(tokens())
            num_blocks = len(tokens()) // BLOCK_SIZE
            await until_known(it, "a", num_blocks)
            published["a"].send(1, payload(removed([1, 2]), {"type": "BlockBlessed"}))
            await it.until(lambda: subscription(it, "a").feed.counts.unknown == 1)
            text = it.app.exposition.text().decode()
            assert f'moestro:route_kv_blocks{{engine="a"}} {num_blocks}.0' in text
            assert f'moestro:route_kv_stored_blocks_total{{engine="a"}} {num_blocks}.0' in text
            assert 'moestro:route_kv_complete{engine="a"} 0.0' in text
            assert 'moestro:route_kv_incomplete_total{engine="a",reason="unknown_event"} 1.0' in text
            assert 'moestro:route_kv_unknown_events_total{engine="a"} 1.0' in text
            assert 'moestro:route_kv_left_out_blocks_total{cause="orphaned",engine="a"} 0.0' in text


@looped
async def test_an_engine_without_a_publisher_is_known_by_prediction():
    with published_by("b") as published:
        async with rig(FakeEngine("a"), FakeEngine("b"), **published.settings) as it:
            await until_known(it, "b", 0)
            assert subscription(it, "a") is None
            first = await ask(it)
            await it.until_idle()
            assert await ask(it) == first


def test_endpoints_are_written_as_in_the_settings_of_engines():
    sources = KvSources(["tcp://*:5557", "b=tcp://10.0.0.2:6000"], ["tcp://*:5558"])
    assert sources.of("a", "10.0.0.1") == KvSource("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert sources.of("b", "::1") == KvSource("tcp://10.0.0.2:6000", "tcp://[::1]:5558")
    assert KvSources(["c=ipc:///run/kv"], []).of("c", "h") == KvSource("ipc:///run/kv", None)
    assert KvSources(["c=ipc:///run/kv"], []).of("a", "h") is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_events": ["http://x:1"]}, "give tcp://"),
        ({"kv_events": ["tcp://*:70000"]}, "give tcp://"),
        ({"kv_events": ["tcp://10.0.0.1:5557"]}, "name the engine"),
        ({"kv_events": ["tcp://*:1", "tcp://*:2"]}, "is already given"),
        ({"kv_events": ["a=tcp://*:1"], "kv_replay": ["b=tcp://*:2"]}, "does not name"),
        ({"kv_events": ["z=tcp://*:1"]}, "names unknown engine z; known engines: e"),
        ({"kv_events": ["tcp://*:1"]}, "give --tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(given, words):
    with pytest.raises(ConfigError, match=words):
        settings_of(engine=("e=http://127.0.0.1:1",), **{name: tuple(value) for name, value in given.items()})
