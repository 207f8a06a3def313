"""A router that joins learns what another one knows of caches."""

from __future__ import annotations

import random

import pytest
from support.routers import router

from moestro.core.hashing import HASH_BYTES, PrefixTree
from moestro.routing.replication import journal
from moestro.routing.replication.journal import (
    MAX_HISTORY_BLOCKS,
    MAX_MESSAGE_BYTES,
    HistoryPart,
    HistoryReader,
    decode_message,
    encode_message,
    history_parts,
)


def chains(rng: random.Random, num_prompts: int) -> list[bytes]:
    """Conversations that share beginnings; a block's name tells all that is before it."""
    prompts = []
    for _ in range(num_prompts):
        names = [f"{rng.randrange(3)}" for _ in range(rng.randrange(1, 12))]
        prompts.append(b"".join("".join(names[: n + 1]).rjust(HASH_BYTES).encode() for n in range(len(names))))
    return prompts


@pytest.mark.parametrize("seed", range(5))
def test_law_prompts_come_out_as_they_were_whatever_the_tree_does_meanwhile(seed, monkeypatch):
    monkeypatch.setattr(journal, "MAX_HISTORY_PROMPTS", 3)
    rng = random.Random(seed)
    tree, prompts = PrefixTree(), chains(rng, 60)
    last_runs = [tree.add(0, prompt) for prompt in prompts]
    reader = HistoryReader()
    reported: list[bytes] = []
    dropped = rng.sample(range(60), 30)
    for part in journal._parts_of("e", list(last_runs), {}):
        assert len(part.prompts) <= 3
        reported += reader.prompts(part)
        for prompt in chains(rng, 3):  # cuts runs
            tree.add(1, prompt)
        if dropped:
            tree.drop(0, last_runs[dropped.pop()])
    assert reported == prompts


def test_shared_blocks_are_sent_once_and_no_message_is_too_large():
    rng, giver, taker = random.Random(0), router(2, "lmetric"), router(2, "lmetric")
    shared = rng.randbytes(2000 * HASH_BYTES)
    for row in range(2):
        for _ in range(1500):
            giver.sent_elsewhere(row, shared + rng.randbytes(HASH_BYTES), 0)
        giver.sent_elsewhere(row, rng.randbytes(MAX_HISTORY_BLOCKS * HASH_BYTES), 0)
    giver.sent_elsewhere(0, rng.randbytes((MAX_HISTORY_BLOCKS + 1) * HASH_BYTES), 0)  # too long, and left out
    reader, num_bytes = HistoryReader(), 0
    for part in history_parts(giver, [("a", 0), ("b", 1)]):
        encoded = encode_message(part)
        assert len(encoded) <= MAX_MESSAGE_BYTES
        num_bytes += len(encoded)
        read = decode_message(encoded)
        for prompt in reader.prompts(read):
            taker.sent_elsewhere("ab".index(read.engine), prompt, 0)
    assert read.is_last
    assert num_bytes < giver.index_bytes, "unrolled it has 96 MB"
    for row in range(2):
        sent = [last.hashes() for last in giver.prompts_sent(row) if last.depth <= MAX_HISTORY_BLOCKS]
        assert [last.hashes() for last in taker.prompts_sent(row)] == sent
        assert len(sent) == 1501


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (HistoryPart("e", [(-1, b"short")], [0]), "not a whole number of blocks"),
        (HistoryPart("e", [(-1, b"")], [0]), "not a whole number of blocks"),
        (HistoryPart("e", [(0, bytes(16))], [0]), "precedes its parent"),
        (HistoryPart("e", [(-2, bytes(16))], [0]), "precedes its parent"),
        (HistoryPart("e", [(-1, bytes(16))], [1]), "an unknown run"),
        (HistoryPart("e", [(-1, bytes(16))], [-1]), "an unknown run"),
        (HistoryPart("e", [(-1, bytes(16 * MAX_HISTORY_BLOCKS)), (0, bytes(16))], [0]), "more than 32,768 blocks"),
    ],
)
def test_a_part_that_no_router_sends_is_refused(part, words):
    with pytest.raises(ValueError, match=words):
        list(HistoryReader().prompts(part))
