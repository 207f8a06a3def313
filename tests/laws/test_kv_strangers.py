"""Law: whatever a publisher sends, no exception leaves the feed, what it holds is bounded, and an index that nothing
spoilt is that of the publisher's cache, however the work is divided into turns.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from support.fake_publisher import BLOCK_SIZE, END, MODEL, FakePublisher, Prompt, Sink, frames, payload, stored

from moestro.routing.kv_events import BATCH_BYTES, UNLIMITED, KvFeed, KvFeedSettings, StreamRules
from moestro.wire.kv_events import MAX_MESSAGE_BYTES
from moestro.wire.kv_names import NamingRules

MAX_WAITING = 3000
MAX_BLOCKS = 40
LIMITS = StreamRules(max_waiting_bytes=MAX_WAITING)
HOSTILE: tuple[Any, ...] = (
    0, -1, 1, BLOCK_SIZE, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 1.5, float("nan"), float("inf"), None,
    True, "", "GPU", "x" * 5000, b"", b"\xff" * 65, b"\xff" * 32, [], [[]], [None], [1, [2, [3, [4]]]],
    [[1, 2], [2, 3]], list(range(300)), {}, {"type": "BlockStored"}, {"cache_salt": 7}, "BlockRemoved",
)  # fmt: skip


class Setting:
    """A feed and its sink, with every line that it logs."""

    def __init__(self, **naming: int) -> None:
        self.sink, self.lines = Sink(), []
        rules = NamingRules(model=MODEL, block_size=BLOCK_SIZE, **naming)
        settings = KvFeedSettings(engine=0, name="e", naming=rules, can_replay=True, stream=LIMITS)
        self.feed = KvFeed(self.sink, settings, lambda kind, text: self.lines.append((kind, text)))
        self.feed.stream.connected(0)

    @property
    def held(self) -> set[bytes]:
        return self.sink.held.get(0, set())


def spoilt(rng: np.random.Generator, body: bytes) -> bytes:
    """A payload with bytes or values that a publisher would not send."""
    draw = rng.random()
    if draw < 0.3:
        raw = bytearray(body)
        for _ in range(rng.integers(1, 4)):
            raw[rng.integers(len(raw))] = rng.integers(256)
        return bytes(raw)
    if draw < 0.4:
        return body[: rng.integers(len(body))]
    batch = msgspec.msgpack.decode(body)
    event = batch[1][rng.integers(len(batch[1]))]
    value = HOSTILE[rng.integers(len(HOSTILE))]
    if isinstance(event, dict):
        event[list(event)[rng.integers(len(event))]] = value
    else:
        event[rng.integers(len(event))] = value
    if rng.random() < 0.1:
        batch[rng.integers(3)] = value
    return msgspec.msgpack.encode(batch)


def history(rng: np.random.Generator, share_spoilt: float) -> list[tuple[int, list[bytes]]]:
    """Messages as (0 live, 1 replayed, 2 a second passes, 3 the connection is lost and made; frames)."""
    process = FakePublisher(rng, arrays=bool(rng.integers(2)), int_hashes=bool(rng.integers(2)), num_kept=50)
    found: list[tuple[int, list[bytes]]] = []
    for _ in range(150):
        for _ in range(rng.integers(1, 4)):
            tokens = tuple(rng.integers(2, size=rng.integers(0, 21)).tolist())
            rng.choice(
                [lambda t=tokens: process.compute(Prompt(t)), lambda: process.evict("GPU"), process.clear],
                p=[0.7, 0.28, 0.02],
            )()
        before = len(process.published)
        process.publish()
        for seq, body in process.published[before:]:
            if rng.random() >= share_spoilt:
                found.append((0, frames(seq, body)))
                continue
            draw = rng.random()
            if draw < 0.5:
                found.append((0, frames(seq, spoilt(rng, body))))
            elif draw < 0.7:
                number = int(HOSTILE[rng.integers(8)]) % (1 << 64)
                found.append((int(rng.integers(2)), frames(number, body)))
            elif draw < 0.8:
                found.append((1, END))
            elif draw < 0.9:
                found.append((int(rng.integers(2)), [rng.bytes(rng.integers(10)) for _ in range(rng.integers(5))]))
            else:
                found.append((int(rng.integers(2, 4)), []))
    return found


def play(setting: Setting, messages: list[tuple[int, list[bytes]]], most: int = UNLIMITED) -> None:
    """Pass messages to a feed as its owner does: none while it is behind."""
    feed, now_ns = setting.feed, 0
    for kind, message in messages:
        if kind == 0:
            feed.live(message, now_ns)
        elif kind == 1:
            feed.replayed(message, now_ns)
        elif kind == 2:
            now_ns += 1_000_000_000
            feed.stream.tick(now_ns)
        else:
            feed.stream.disconnected(now_ns)
            feed.stream.connected(now_ns)
        feed.stream.request()
        waiting = BATCH_BYTES + (len(message[-1]) if message else 0)
        assert feed.stream.num_waiting_bytes <= MAX_WAITING + waiting
        while feed.is_behind:
            feed.work(now_ns, most)
        assert feed.num_blocks <= MAX_BLOCKS
        assert len(setting.held) <= MAX_BLOCKS


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_is_sent_breaks_a_feed_and_small_turns_change_nothing(seed):
    messages = history(np.random.default_rng(seed), 0.3)
    whole, turns = Setting(max_num_blocks=MAX_BLOCKS), Setting(max_num_blocks=MAX_BLOCKS)
    play(whole, messages)
    play(turns, messages, 1)
    assert whole.held == turns.held
    assert whole.feed.counts == turns.feed.counts
    assert whole.lines == turns.lines
    assert whole.feed.counts.illegible > 5


@pytest.mark.parametrize("seed", range(6))
def test_an_index_that_nothing_spoilt_is_the_cache(seed):
    rng = np.random.default_rng(seed)
    process = FakePublisher(rng, arrays=bool(seed % 2), int_hashes=bool(seed % 3), num_kept=10)
    setting = Setting()
    setting.feed.replayed(END, 0)
    for _ in range(100):
        process.compute(Prompt(tuple(rng.integers(2, size=rng.integers(0, 600)).tolist())))
        if rng.random() < 0.3:
            process.evict("GPU")
        before = len(process.published)
        process.publish()
        for batch in process.published[before:]:
            setting.feed.live(frames(*batch), 0)
            while setting.feed.is_behind:
                setting.feed.work(0, int(rng.integers(1, 100)))
        if process.published:
            assert setting.held == process.names_after[-1]
            assert setting.feed.is_complete == (setting.feed.counts.unknown == 0)
    assert setting.feed.counts.unknown > 5  # no other event ends completeness
    assert [kind for kind, _ in setting.lines] == ["incomplete"]


def test_the_work_of_one_turn_does_not_grow_with_the_message():
    """Each call of `work` passes at most a part of an event to the router, however large the event is."""
    setting = Setting()
    setting.feed.replayed(END, 0)
    num_blocks = 20_000
    event = stored(list(range(num_blocks)), None, list(range(BLOCK_SIZE * num_blocks)))
    body = payload(event)
    assert len(body) < MAX_MESSAGE_BYTES
    setting.feed.live(frames(0, body), 0)
    num_calls, before = 0, 0
    while setting.feed.is_behind:
        setting.feed.work(0, 256)
        assert setting.feed.num_blocks - before <= 256 + 64
        before = setting.feed.num_blocks
        num_calls += 1
    assert setting.feed.num_blocks == num_blocks
    assert num_calls > 60


def test_a_batch_too_large_for_its_kind_is_refused_before_it_is_built():
    for event in (stored([1], None, [1] * (1 << 21)), stored([1] * (1 << 17), None, [])):
        setting = Setting()
        setting.feed.replayed(END, 0)
        setting.feed.live(frames(0, payload(event)), 0)
        setting.feed.work(0)
        assert setting.feed.counts.illegible == 1
    setting = Setting()
    setting.feed.live(frames(0, msgspec.msgpack.encode([1.0, [None] * (1 << 17), 0])), 0)
    setting.feed.replayed(END, 0)
    setting.feed.work(0)
    assert "given up" in [kind for kind, _ in setting.lines]
    assert not setting.feed.is_complete
