"""`moestro serve` says what its prefix caches hold, and who listens as one listens to vLLM understands every block."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from support.fake_publisher import Sink
from support.kv_listener import MODEL, Listener, free_ports, names, publishing_config
from support.running import Running, complete, wait_until

from moestro.config.launch_spec import KvEventsSettings, kv_events_from
from moestro.errors import ConfigError
from moestro.gateway.engines.kv_subscriber import KvSubscription
from moestro.gateway.part_settings import KvSource
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.web.ports.faults import LogLimit
from moestro.wire.kv_names import NamingRules

PROMPT = "def fibonacci(number):\n    return number if number < 2 else fibonacci(number - 1)\n" * 4


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def publishing(real_command, tmp_path_factory, ports):
    directory = tmp_path_factory.mktemp("publishing")
    config = ("--kv-events-config", publishing_config(ports))
    command = (*real_command, "--engines", "2", "--route-policy", "round_robin", *config)
    server = Running(command, directory)
    yield server
    server.kill()


def test_every_block_of_prompt_and_answer_is_received_with_its_salt(publishing, ports):
    listeners = [Listener(ports[0] + rank, ports[1] + rank) for rank in range(2)]
    try:
        for rank in range(2):
            listeners[rank].ask()
        for salt in (None, None, "tenant", "tenant"):
            complete(publishing, prompt=PROMPT, max_tokens=24, temperature=0, cache_salt=salt)
        for listener in listeners:
            wait_until(lambda received=listener: set(names(PROMPT) + names(PROMPT, "tenant")) <= received.held)
            assert len(listener.held) > len(names(PROMPT)) * 2  # blocks of the answers too
            assert listener.feed.stream.is_complete
            assert listener.feed.counts.blocks.orphaned == listener.feed.counts.illegible == 0
        assert [listener.feed.dp_rank for listener in listeners] == [0, 1]
    finally:
        for listener in listeners:
            listener.close()


def test_the_routers_own_subscription_finds_all_that_was_stored_before_it_came(publishing, ports):
    async def received() -> Sink:
        sink = Sink()
        naming = NamingRules(model=MODEL, block_size=16)
        log = LogLimit(logging.getLogger())
        feed = KvFeed(sink, KvFeedSettings(engine=0, name="e", naming=naming, can_replay=True), log.warning)
        source = KvSource(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        task = asyncio.create_task(KvSubscription(source, feed, lambda: 0, log).run())
        async with asyncio.timeout(60):
            while not (feed.stream.is_complete and feed.num_blocks):  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sink

    complete(publishing, prompt=PROMPT, max_tokens=1)
    complete(publishing, prompt=PROMPT, max_tokens=1)
    assert set(names(PROMPT)) <= asyncio.run(received()).held[0]


def test_what_was_missed_is_sent_again_and_a_new_process_is_known_for_one(publishing, ports):
    listener = Listener(*ports)
    try:
        wait_until(lambda: listener.held)
        for text in ("import os\n" * 40, "import re\n" * 40):  # one of each goes to the other rank
            complete(publishing, prompt=text, max_tokens=1)
            complete(publishing, prompt=text, max_tokens=1)
        assert listener.lose() > 0
        last = "class Tree:\n" * 40
        complete(publishing, prompt=last, max_tokens=1)
        complete(publishing, prompt=last, max_tokens=1)
        wait_until(lambda: set(names("import os\n" * 40) + names(last)) <= listener.held)
        assert listener.feed.counts.stream.gaps > 0
        assert listener.feed.counts.stream.lost == 0
        for rank in publishing.ranks():
            rank.kill()
        deadline = time.monotonic() + 30
        while listener.feed.counts.stream.restarts == 0 and time.monotonic() < deadline:
            time.sleep(0.2)
            listener.feed.stream.disconnected(0)
            listener.feed.stream.connected(0)
            start = listener.feed.stream.request()
            listener.replay.send_multipart([b"", start.to_bytes(8, "big")])
            while listener.replay.poll(200) and not listener.feed.replayed(listener.replay.recv_multipart(), 0):
                pass
        assert listener.feed.counts.stream.restarts == 1
        assert listener.sink.held[0] == set()
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"endpont": "tcp://*:1"}', "endpont"),
        ('{"endpoint": "ipc://x"}', "tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*:0"}', "tcp://HOST:PORT"),
        ('{"buffer_steps": 0}', "buffer_steps"),
    ],
)
def test_what_is_wrong_with_the_configuration_is_stated(text, words):
    with pytest.raises(ConfigError, match=words):
        kv_events_from(text)


def test_nothing_is_published_unless_requested():
    assert kv_events_from(None) is None
    assert kv_events_from('{"endpoint": "tcp://*:5557"}') is None
    assert kv_events_from('{"enable_kv_cache_events": true, "publisher": "null"}') is None


def test_ports_of_several_engines_may_not_meet():
    settings = KvEventsSettings(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")
    settings.check_ports(1)
    with pytest.raises(ConfigError, match="2 engines listen on 2 ports from 5557 and from 5558"):
        settings.check_ports(2)


@pytest.mark.parametrize(("name", "port"), [("endpoint", 65_535), ("replay_endpoint", 99_999)])
def test_ports_end_at_65535(name, port):
    settings = KvEventsSettings(**{"replay_endpoint": "tcp://*:1"} | {name: f"tcp://*:{port}"})
    with pytest.raises(ConfigError, match=f"engine 1 has port {port + 1}, above 65535"):
        settings.check_ports(2)
