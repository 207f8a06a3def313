"""The tree of prompts against lists of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moestro.core.hashing import HASH_BYTES, BlockRun, PrefixTree, split_hashes


def packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "little") for number in numbers)


def prompt(rng: random.Random) -> bytes:
    """Blocks named as a chain is: by all that is before them."""
    turns = [rng.randrange(3) for _ in range(rng.randrange(8))]
    return packed(*(int("1" + "".join(map(str, turns[: depth + 1]))) for depth in range(len(turns))))


@pytest.mark.parametrize("seed", range(5))
def test_law_random_histories_equal_lists_of_prompts(seed):
    rng = random.Random(seed)
    tree, prompts = PrefixTree(), [list[tuple[bytes, BlockRun | None]]() for _ in range(5)]
    for _ in range(2000):
        holder = rng.randrange(5)
        mine = prompts[holder]
        queried = prompt(rng)
        tree.find(queried)  # what it finds must not outlast a change
        if rng.random() < 0.5 + 0.4 * (len(mine) < 10):
            added = prompt(rng)
            mine.append((added, tree.add(holder, added)))
        elif mine:
            last = mine.pop(rng.randrange(len(mine)))[1]
            if last is not None:
                tree.drop(holder, last)
        check(tree, prompts, queried)
    for holder, mine in enumerate(prompts):
        for _, last in mine:
            if last is not None:
                tree.drop(holder, last)
    assert len(tree) == 0


def check(tree: PrefixTree, prompts: list[list[tuple[bytes, BlockRun | None]]], queried: bytes) -> None:
    counts = [Counter(block for hashes, _ in mine for block in split_hashes(hashes)) for mine in prompts]
    run, num_blocks = tree.find(queried)
    blocks = split_hashes(queried)
    assert num_blocks == [*(any(block in count for count in counts) for block in blocks), False].index(False)
    if run is not None:
        block = blocks[num_blocks - 1]
        assert run.counts == {holder: count[block] for holder, count in enumerate(counts) if count[block]}
        assert run.holders == sum(1 << holder for holder in run.counts)
        assert run.hashes()[: num_blocks * HASH_BYTES] == queried[: num_blocks * HASH_BYTES]
    for holder, mine in enumerate(prompts):
        assert tree.num_blocks[holder] == len(counts[holder])
        assert all(last.hashes() == hashes for hashes, last in mine if last is not None)


def test_runs_are_cut_only_where_prompts_part():
    tree = PrefixTree()
    tree.add(0, packed(*range(1, 101)))
    tree.add(1, packed(*range(1, 101)))
    assert len(tree) == 1
    assert [tree.num_runs[holder] for holder in (0, 1)] == [1, 1]
    tree.add(2, packed(*range(1, 51), 1001, 1002))
    assert len(tree) == 3
    assert [tree.num_runs[holder] for holder in (0, 1, 2)] == [2, 2, 2]


def test_a_block_that_follows_another_than_before_is_not_believed():
    tree = PrefixTree()
    tree.add(0, packed(1, 2))
    tree.add(0, packed(1, 3))
    last = tree.add(1, packed(5, 3, 4))
    assert tree.find(packed(5, 3, 4))[1] == 3  # 3 is the beginning of no run but behind 1: here it is inside of one
    assert last is not None
    assert tree.add(1, packed(2, 9)) is None
    assert tree.find(packed(2))[1] == 0
