"""What real vLLM servers published (tools/capture_kv_events.py), understood: at each request the blocks that the router
counts as held are those that vLLM then found in its cache, by its own count.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.fake_publisher import Sink, as_array

from moestro.core.hashing import HASH_BYTES, hash_blocks, hash_key, split_hashes
from moestro.routing.kv_events import KvFeed, KvFeedSettings
from moestro.text.tokenizer import Tokenizer
from moestro.wire.kv_names import NamingRules

BLOCK_SIZE = 32
FIXTURES = Path(__file__).parent / "fixtures"
CAPTURES = sorted(FIXTURES.glob("vllm_*.jsonl"))
DEMO = Path(__file__).parents[2] / "src" / "moestro" / "assets" / "demo"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def frames_of(line: dict, *, arrays: bool) -> list[bytes]:
    """As captured; with `arrays`, in the encoding that vLLM had until mid-2026."""
    frames = [base64.b64decode(frame) for frame in line["frames"]]
    if arrays and frames[-1]:
        ts, events, rank = msgspec.msgpack.decode(frames[-1])
        frames[-1] = msgspec.msgpack.encode([ts, [as_array(event) for event in events], rank])
    return frames


def names_of(request: dict) -> list[bytes]:
    key = hash_key("m", None, request["salt"])
    return split_hashes(hash_blocks(key, np.array(request["token_ids"], np.int32), BLOCK_SIZE))


def expected_hit(sink: Sink, request: dict) -> int:
    """Tokens; the last token is always computed, and with it, in vLLM, its block."""
    held, hits = sink.held.get(3, set()), 0
    for name in names_of(request):
        if name not in held:
            break
        hits += BLOCK_SIZE
    return min(hits, (len(request["token_ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE)


def play(path: Path, *, arrays: bool) -> tuple[KvFeed, Sink, int]:
    """A capture, from its first line to its last. Returns also how many requests' hits were foretold."""
    sink = Sink()
    naming = NamingRules(model="m", block_size=BLOCK_SIZE)
    feed = KvFeed(sink, KvFeedSettings(engine=3, name="e1", naming=naming, can_replay=True), lambda _kind, _text: None)
    is_connected, num_checked = False, 0
    for now_ns, line in enumerate(lines(path)):
        if line["at"] == "connected":
            is_connected = True
            feed.stream.connected(now_ns)
        elif line["at"] == "disconnected":
            is_connected = False
            feed.stream.disconnected(now_ns)
        elif line["at"] == "live":
            feed.live(frames_of(line, arrays=arrays), now_ns)
            feed.work(0)
        elif line["at"] == "replayed":
            frames = frames_of(line, arrays=arrays)
            wanted = feed.stream.request()
            if (
                wanted is not None and frames[-1]
            ):  # the first answer; a publisher that has it begins with what is requested
                assert int.from_bytes(frames[-2], "big") == wanted
            feed.replayed(frames, now_ns)
            feed.work(0)
        elif line["at"] == "request" and is_connected:
            assert expected_hit(sink, line) == line["cached_tokens"], line
            num_checked += 1
    return feed, sink, num_checked


@pytest.mark.parametrize("arrays", [False, True], ids=["maps", "arrays"])
@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_hit_that_vllm_had_was_predicted_and_no_other(path, arrays):
    feed, _, num_checked = play(path, arrays=arrays)
    assert num_checked == 13
    assert sum(line.get("cached_tokens", 0) > 0 for line in lines(path)) >= 4
    assert feed.stream.is_complete
    counts = feed.counts
    assert (counts.stream.gaps, counts.stream.restarts, counts.stream.lost) == (1, 1, 0)
    assert counts.cleared == 1
    assert counts.blocks.removed > 0
    assert (counts.illegible, counts.unknown, counts.blocks.orphaned, counts.blocks.unnamed) == (0, 0, 0, 0)
    assert feed.dp_rank == 0
    assert feed.block_size_seen == BLOCK_SIZE


def test_without_the_replay_a_gap_leaves_nothing_that_is_not_held():
    sink = Sink()
    naming = NamingRules(model="m", block_size=BLOCK_SIZE)
    feed = KvFeed(sink, KvFeedSettings(engine=3, name="e1", naming=naming, can_replay=False), lambda _kind, _text: None)
    is_connected = False
    for now_ns, line in enumerate(lines(CAPTURES[0])):
        if line["at"] == "connected":
            feed.stream.connected(now_ns)
        elif line["at"] == "live":
            feed.live(frames_of(line, arrays=False), now_ns)
            feed.work(0)
        is_connected = line["at"] == "connected" or (is_connected and line["at"] != "disconnected")
        if line["at"] == "request" and is_connected:
            assert expected_hit(sink, line) <= line["cached_tokens"]
    assert feed.counts.stream.lost == 3  # the gap, and a new connection with an unknown past, twice


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_blocks_named_from_events_are_those_of_the_prompt_named_from_its_text(path):
    """The conversation's messages through our template, tokenizer and hash chain, against names made of token ids that
    came by the wire.
    """
    tokenizer = Tokenizer(DEMO)
    named_by_events: set[bytes] = set()
    sink = Sink()
    feed = KvFeed(
        sink,
        KvFeedSettings(engine=3, name="e1", naming=NamingRules(model="m", block_size=BLOCK_SIZE), can_replay=False),
        lambda _kind, _text: None,
    )
    num_blocks = 0
    for line in lines(path):
        if line["at"] in ("live", "lost"):
            feed.live(frames_of(line, arrays=False), 0)
            feed.work(0)
            named_by_events |= sink.held.get(3, set())
    for line in lines(path):
        if line.get("messages"):
            ids = tokenizer.encode(tokenizer.render_chat(line["messages"]), add_special_tokens=False)
            assert ids == line["token_ids"]
            key = hash_key("m", None, line["salt"])
            packed = hash_blocks(key, np.array(ids, np.int32), BLOCK_SIZE)
            assert set(split_hashes(packed)) <= named_by_events
            num_blocks += len(packed) // HASH_BYTES
    assert num_blocks >= 10
