import json
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.fake_publisher import BLOCK_SIZE, MODEL, Sink, frames, payload, removed, stored

from moestro.core.hashing import hash_blocks, hash_key, split_hashes
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import RouterSettings
from moestro.web.ports.faults import LogLimit
from moestro.wire.kv_names import NamingRules

TOKENS = list(range(8))
NAMES = split_hashes(hash_blocks(hash_key(MODEL), np.array(TOKENS, np.int32), BLOCK_SIZE))


class Setting:
    def __init__(self) -> None:
        self.sink = Sink()
        naming = NamingRules(model=MODEL, block_size=BLOCK_SIZE)
        self.warnings: list[tuple[str, str]] = []
        settings = KvFeedSettings(engine=5, name="e5", naming=naming, can_replay=False)
        self.feed = KvFeed(self.sink, settings, lambda kind, text: self.warnings.append((kind, text)))
        self.num_published = 0

    def publish(self, *events: dict, rank: int = 0) -> None:
        self.feed.live(frames(self.num_published, payload(*events, rank=rank)), 0)
        self.feed.work(0)
        self.num_published += 1

    @property
    def held(self) -> set[bytes]:
        return self.sink.held.get(5, set())


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_blocks_come_and_go_in_the_order_of_events(setting):
    setting.publish(stored([1, 2], None, TOKENS), removed([2]))
    assert setting.held == {NAMES[0]}
    setting.publish(removed([1]), stored([1, 2], None, TOKENS))
    assert setting.held == set(NAMES)
    setting.publish({"type": "AllBlocksCleared"})
    assert setting.held == set()
    assert setting.sink.calls[-1] == "cleared"


def test_what_the_router_has_forgotten_is_reported_again(setting):
    setting.feed.tell_again()
    setting.feed.work(0)
    assert setting.sink.calls == []
    setting.publish(stored([1, 2], None, TOKENS))
    setting.sink.held.clear()
    setting.sink.calls.clear()
    setting.feed.tell_again()
    setting.feed.work(0)
    assert setting.held == set(NAMES)
    assert setting.sink.calls == ["cleared", "stored"]  # it is all that there is
    setting.publish({"type": "BlockRemoved"}, stored([1], None, TOKENS[:4]))
    setting.sink.calls.clear()
    setting.feed.tell_again()
    setting.feed.work(0)
    assert setting.sink.calls == ["stored"]  # and now it may not be


def test_a_second_rank_on_a_stream_is_kept_apart(setting):
    setting.publish(stored([1], None, TOKENS[:4]), rank=1)
    setting.publish(removed([1]), rank=0)
    assert setting.held == {NAMES[0]}
    assert setting.feed.counts.other_rank == 1
    assert "ranks 1 and 0" in setting.warnings[0][1]


def test_another_block_size_is_logged(setting):
    setting.publish(stored([1], None, TOKENS, block_size=8))
    assert setting.held == set()
    ((kind, text),) = setting.warnings
    assert kind == "block size"
    assert text.startswith("e5: the engine's KV blocks have 8 tokens, the router's 4")


@pytest.mark.parametrize("bad", [{"type": "BlockRemoved"}, {"type": "BlockRemoved", "block_hashes": "all"}])
def test_a_removal_that_cannot_be_read_leaves_nothing_believed(setting, bad):
    setting.publish(stored([1], None, TOKENS[:4]), bad, stored([2], None, TOKENS[4:]))
    assert setting.sink.calls == ["cleared", "stored", "lost", "stored"]
    assert setting.feed.num_blocks == 1


def test_a_batch_that_cannot_be_read_leaves_nothing_believed(setting):
    setting.publish(stored([1], None, TOKENS[:4]))
    setting.feed.live(frames(1, b"\xc1"), 0)
    setting.feed.work(0)
    assert setting.held == set()
    assert setting.feed.counts.illegible == 1
    assert "is given up, and its cache is predicted: a batch of KV events cannot be decoded" in setting.warnings[0][1]


def test_a_message_of_another_source_changes_nothing(setting):
    setting.publish(stored([1], None, TOKENS[:4]))
    setting.feed.live([b"hello"], 0)
    setting.feed.work(0)
    assert setting.held == {NAMES[0]}
    assert "not from a KV event publisher" in setting.warnings[0][1]


def test_hashes_that_do_not_chain_are_reported_and_not_believed(setting):
    setting.publish(stored([1], None, TOKENS[:4]), stored([2, 1], None, TOKENS[4:] + TOKENS[:4]))
    assert setting.sink.calls == ["cleared", "stored", "lost"]
    assert "different blocks have the same hash" in setting.warnings[0][1]


def test_a_restarted_engine_holds_nothing_and_may_be_of_another_rank(setting):
    setting.publish(stored([1], None, TOKENS[:4]), rank=0)
    setting.num_published = 0
    setting.publish(stored([1], None, TOKENS[4:]), rank=1)
    assert setting.sink.calls == ["cleared", "stored", "cleared", "lost", "cleared", "stored"]
    assert setting.held != {NAMES[0]}
    assert setting.feed.counts.stream.restarts == 1


def test_odd_batches_are_one_log_line_whatever_their_numbers_say_of_restarts(setting, caplog):
    settings = KvFeedSettings(
        engine=5, name="e5", naming=NamingRules(model=MODEL, block_size=BLOCK_SIZE), can_replay=False
    )
    feed = KvFeed(setting.sink, settings, LogLimit(logging.getLogger()).warning)
    for seq in (9, 3) * 20:
        feed.live(frames(seq, b"\xc1"), 0)
        feed.work(0)
        feed.live([b"hello"], 0)
    assert feed.counts.stream.restarts == 20  # each of which used to permit one more line
    batch, message = [message.split("(")[0] for message in caplog.messages]
    assert batch.endswith("is given up, and its cache is predicted: a batch of KV events cannot be decoded ")
    assert message == "e5: a message is not from a KV event publisher "


@pytest.mark.parametrize(
    ("event", "reason", "words"),
    [
        (stored([9], 404, TOKENS[:4]), "orphaned", "behind a block that no event has stored"),
        (stored(["9f"], None, TOKENS[:4]), "unreadable_event", "an event that stores blocks cannot be read"),
        (stored([9], None, ["a"] * 4), "unreadable_event", "an event that stores blocks cannot be read"),
        (stored([9, 10], None, TOKENS[:4]), "malformed", "not as many tokens"),
        (stored([9], None, TOKENS[:4], lora_id=3), "malformed", "no name of its adapter"),
        (
            stored([9], None, TOKENS, block_size=8),
            "other_size",
            "have 8 tokens, the router's 4, so its cache is predicted",
        ),
        ({"type": "BlockBlessed"}, "unknown_event", "unknown type"),
    ],
)
def test_an_event_that_is_left_out_ends_completeness_once_and_keeps_known_blocks(setting, event, reason, words):
    setting.publish(stored([1], None, TOKENS[:4]))
    assert setting.feed.is_complete
    setting.publish(event, event)
    setting.publish(event)
    assert not setting.feed.is_complete
    assert setting.sink.calls == ["cleared", "stored", "incomplete"]
    assert setting.held == {NAMES[0]}
    assert setting.feed.counts.incomplete[reason] == sum(setting.feed.counts.incomplete.values()) == 1
    lines = {text for kind, text in setting.warnings}
    assert len(lines) == 1
    assert words in lines.pop()
    setting.publish({"type": "AllBlocksCleared"}, stored([1], None, TOKENS[:4]))
    assert setting.feed.is_complete


@pytest.mark.parametrize(
    "event",
    [
        stored([9], None, TOKENS[:4], extra_keys=[[["picture", 1]]]),
        stored([9], None, TOKENS[:4], medium="DISK"),
        stored([9], None, TOKENS[:4], locality="REMOTE"),
        stored([9], None, TOKENS[:4], kv_cache_spec_kind="sliding_window"),
    ],
)
def test_blocks_that_no_prompt_of_the_router_can_hit_are_not_missed(setting, event):
    setting.publish(event, stored([10], 9, TOKENS[4:], extra_keys=event.get("extra_keys") and [None]) | {
        key: event[key] for key in ("medium", "locality", "kv_cache_spec_kind") if key in event
    })  # fmt: skip
    assert setting.feed.is_complete
    assert setting.warnings == []


def test_an_index_without_memory_for_all_blocks_is_not_complete():
    warnings = []
    router = Router(ROUTE_POLICIES.make("lmetric"), RouterSettings(index_bytes=1000, block_size=BLOCK_SIZE))
    engine = router.add_engine()
    naming = NamingRules(model=MODEL, block_size=BLOCK_SIZE)
    settings = KvFeedSettings(engine=engine, name="e5", naming=naming, can_replay=False)
    feed = KvFeed(router, settings, lambda kind, text: warnings.append(text))
    for seq in range(6):
        feed.live(frames(seq, payload(stored([seq], None, [seq] * 4))), 0)
        feed.work(0)
        assert feed.is_complete == router.reports_all_blocks(engine) == (seq < 3)
    assert feed.counts.incomplete["index_memory"] == 1
    (line,) = warnings
    assert line.endswith("they exceed the engine's share of --index-memory-bytes; raise it")


def test_a_recorded_eagle_event_of_sglang_is_a_hit():
    cases = Path(__file__).parents[3] / "shared" / "cases" / "06_bigram_event.json"
    if not cases.exists():
        pytest.skip("no recorded cases here")
    event = json.loads(cases.read_text())
    sink = Sink()
    naming = NamingRules(model=MODEL, block_size=16)
    feed = KvFeed(sink, KvFeedSettings(engine=5, name="e5", naming=naming, can_replay=False), pytest.fail)
    feed.live(frames(0, msgspec.msgpack.encode([1.0, [event], 0])), 0)
    feed.work(0)
    assert sink.held[5] == set(split_hashes(hash_blocks(hash_key(MODEL), np.arange(5, 21, dtype=np.int32), 16)))
