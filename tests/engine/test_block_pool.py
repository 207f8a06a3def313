import numpy as np
import pytest

from moestro.engine.block_pool import BlockPool
from moestro.errors import InvariantError


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_conserved_under_any_traffic(seed):
    rng = np.random.default_rng(seed)
    pool, held, serial = BlockPool(24), [], 0
    for _ in range(400):
        action = rng.integers(5)
        if action == 0 and pool.num_free:
            held.append(pool.allocate_many(int(rng.integers(1, pool.num_free + 1))))
        elif action == 1 and held:
            pool.release(held.pop(rng.integers(len(held))))
        elif action == 2 and held:
            for block in held[rng.integers(len(held))]:
                pool.remember([block], [bytes([serial % 30]) * 16])
                serial += 1
        elif action == 3:
            found = pool.find_prefix([bytes([i % 30]) * 16 for i in range(serial, serial + 3)])
            pool.share(found)
            held.append(found)
        elif action == 4:
            names = [bytes([i % 30]) * 16 for i in range(serial, serial + 2)]
            pool.forget(names)
            assert not any(pool.find_prefix([name]) for name in names)
        pool.check(held)


def test_a_freed_prefix_is_found_again_until_its_block_is_given_out():
    pool = BlockPool(3)
    blocks = [pool.allocate(), pool.allocate()]
    pool.remember([blocks[0]], [b"a"])
    pool.remember([blocks[1]], [b"b"])
    pool.release(blocks)
    assert pool.find_prefix([b"a", b"b", b"c"]) == blocks
    pool.allocate()  # the blank one goes first
    assert pool.find_prefix([b"a", b"b"]) == blocks
    pool.allocate()  # then the end of the prefix
    assert pool.find_prefix([b"a", b"b"]) == blocks[:1]


def test_the_prefix_unused_the_longest_is_forgotten_first():
    pool = BlockPool(2)
    old, new = pool.allocate(), pool.allocate()
    pool.remember([old], [b"old"])
    pool.remember([new], [b"new"])
    pool.release([old])
    pool.release([new])
    pool.share([old])
    pool.release([old])
    pool.allocate()
    assert pool.find_prefix([b"new"]) == []
    assert pool.find_prefix([b"old"]) == [old]


@pytest.mark.parametrize("num_cached", range(6))
@pytest.mark.parametrize("at_most", range(6))
def test_the_estimate_of_a_cached_prefix_is_its_length_where_nothing_is_missing_inside(num_cached, at_most):
    pool, hashes = BlockPool(8), [bytes([i]) * 16 for i in range(5)]
    for block_hash in hashes[:num_cached]:
        pool.remember([pool.allocate()], [block_hash])
    assert pool.estimate_prefix(hashes, at_most) == len(pool.find_prefix(hashes[:at_most]))


def test_the_version_changes_when_a_hash_comes_or_goes():
    pool = BlockPool(1)
    versions = [pool.version]
    block = pool.allocate()
    pool.remember([block], [b"a" * 16])
    versions.append(pool.version)
    pool.release([block])
    versions.append(pool.version)
    pool.allocate()
    versions.append(pool.version)
    assert versions == [0, 1, 1, 2]


def test_taking_a_shared_block_counts_only_where_it_was_free():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.remember([block], [b"a"])
    assert pool.num_free_among([block]) == 0
    pool.release([block])
    assert pool.num_free_among([block]) == 1


def test_two_blocks_of_one_hash_the_first_keeps_it():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.remember([first], [b"a"])
    pool.remember([second], [b"a"])
    assert pool.find_prefix([b"a"]) == [first]
    pool.release([second])
    pool.check([[first]])


def test_without_prefix_caching_nothing_is_remembered():
    pool = BlockPool(2, enable_prefix_caching=False)
    pool.remember([pool.allocate()], [b"a"])
    assert pool.find_prefix([b"a"]) == []


def test_impossible_moves_are_bugs_and_say_so():
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(InvariantError, match="pool of 0"):
        pool.allocate()
    pool.release([block])
    with pytest.raises(InvariantError, match="has no holder"):
        pool.release([block])
    with pytest.raises(InvariantError, match="reference counts"):
        pool.check([[block]])


def test_hits_and_releases_in_turn_keep_the_order_of_last_use():
    pool = BlockPool(4)
    blocks = pool.allocate_many(3)
    names = [b"a", b"b", b"c"]
    pool.remember(blocks, names)
    pool.release(blocks)
    for _ in range(20):  # more entries than the pool has room for, so old ones are dropped
        pool.share(blocks[:1])
        pool.release(blocks[:1])
    pool.check([])
    assert pool.cached() == [blocks[2], blocks[1], blocks[0]]
    pool.forget([b"b"])
    assert pool.allocate_many(4)[2:] == [blocks[2], blocks[0]]
