import msgspec
import numpy as np
import pytest
from support.fake_publisher import BLOCK_SIZE, MODEL, removed, stored

from moestro.core.hashing import hash_blocks, hash_key
from moestro.wire.kv_events import BlockRemoved, BlockStored, decode_event
from moestro.wire.kv_names import NamedBlocks, NamingCounts, NamingRules, PlacedBlocks

TOKENS = list(range(12))


def names(tokens: list[int], adapter: str | None = None, salt: str | None = None) -> bytes:
    return hash_blocks(hash_key(adapter or MODEL, None, salt), np.array(tokens, np.int32), BLOCK_SIZE)


class Cache:
    def __init__(self, **rules) -> None:
        self.counts = NamingCounts()
        self.blocks = NamedBlocks(NamingRules(model=MODEL, block_size=BLOCK_SIZE, **rules), self.counts)

    def place(self, *event, **more) -> PlacedBlocks:
        reported = decode_event(msgspec.Raw(msgspec.msgpack.encode(stored(*event, **more))))
        assert isinstance(reported, BlockStored)
        return self.blocks.store(reported)

    def store(self, *event, **more) -> bytes:
        placed = self.place(*event, **more)
        assert not placed.removed
        return placed.stored + placed.hosted

    def displace(self, *event, **more) -> PlacedBlocks:
        fields = removed(*event, **more)
        del fields["type"]
        return self.blocks.remove(BlockRemoved(**fields))

    def remove(self, *event, **more) -> bytes:
        return self.displace(*event, **more).removed


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_a_chain_reported_in_pieces_has_the_names_of_the_whole(cache):
    assert cache.store([1, 2], None, TOKENS[:8]) + cache.store([3], 2, TOKENS[8:]) == names(TOKENS)
    assert cache.blocks.num_blocks == cache.counts.stored == 3


def test_a_removed_block_is_named_and_may_still_be_a_parent(cache):
    cache.store([1, 2], None, TOKENS[:8])
    assert cache.remove([2]) == names(TOKENS)[16:32]
    assert cache.remove([2, 99]) == b""
    assert cache.store([3], 2, TOKENS[8:]) == names(TOKENS)[32:]


def test_of_blocks_that_are_gone_only_the_last_are_still_parents(cache, monkeypatch):
    monkeypatch.setattr("moestro.wire.kv_names._NUM_LEFT", 2)
    cache.store([1, 2, 3], None, TOKENS)
    for theirs in (1, 2, 3):
        cache.remove([theirs])
    assert cache.store([4], 1, TOKENS[4:8]) == b""
    assert cache.store([3], 2, TOKENS[8:]) == names(TOKENS)[32:]


def test_a_block_behind_an_unknown_one_is_left_out(cache):
    assert cache.store([3], 2, TOKENS[8:]) == b""
    assert cache.counts.orphaned == 1


def test_a_block_stays_until_no_tier_holds_it(cache):
    cache.store([1], None, TOKENS[:4])
    assert cache.store([1], None, TOKENS[:4], medium="CPU") == names(TOKENS[:4])
    assert cache.remove([1], "GPU") == b""
    assert cache.remove([1], "CPU") == names(TOKENS[:4])


def test_a_block_is_on_the_host_while_no_device_tier_holds_it(cache):
    name = names(TOKENS[:4])
    assert cache.place([1], None, TOKENS[:4]) == PlacedBlocks(stored=name)
    assert cache.place([1], None, [], medium="CPU", block_size=0) == PlacedBlocks(stored=name)
    assert cache.displace([1], "GPU") == PlacedBlocks(hosted=name)
    assert cache.blocks.placed() == PlacedBlocks(hosted=name)
    assert cache.blocks.num_hosted == 1
    assert cache.place([1], None, TOKENS[:4]) == PlacedBlocks(stored=name), "it was copied back"
    assert cache.displace([1], "CPU") == PlacedBlocks()
    assert cache.blocks.placed() == PlacedBlocks(stored=name)
    assert cache.blocks.num_hosted == 0


def test_a_block_that_a_store_outside_the_device_alone_has_is_hosted():
    cache = Cache(tiers=("GPU", "STORAGE"))
    assert cache.place([1], None, TOKENS[:4], medium="storage") == PlacedBlocks(hosted=names(TOKENS[:4]))


def test_an_offloaded_block_without_tokens_keeps_its_name(cache):
    cache.store([1, 2], None, TOKENS[:8])
    cache.remove([1])
    assert cache.store([1], None, [], medium="CPU", block_size=0) == names(TOKENS)[:16]
    assert cache.remove([1], "CPU") == names(TOKENS)[:16]
    assert cache.store([9], None, [], medium="CPU", block_size=0) == b""
    assert cache.counts.orphaned == 1


def test_a_chunk_of_lmcache_has_the_blocks_of_the_device_below_it(cache):
    """LMCache's connector names no group of layers, and its chunks have hashes and sizes of their own."""
    chunk, whole = {"medium": "cpu", "block_size": 8}, {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    cache.store([1, 2, 3], None, TOKENS, **whole)
    assert cache.place([-77], None, TOKENS[:8], **chunk) == PlacedBlocks(stored=names(TOKENS[:8]))
    gone = cache.displace([1, 2, 3], group_idx=0)
    assert gone == PlacedBlocks(hosted=names(TOKENS[:8]), removed=names(TOKENS)[32:])
    assert cache.blocks.placed() == PlacedBlocks(hosted=names(TOKENS[:8]))
    assert cache.blocks.num_hosted == cache.blocks.num_blocks == 2
    longer = [*TOKENS, *TOKENS[:4]]
    assert cache.place([-78], -77, longer[8:], **chunk) == PlacedBlocks(hosted=names(longer)[32:])
    assert (cache.blocks.gap, cache.blocks.block_size_seen) == (None, BLOCK_SIZE)
    assert cache.place([1, 2], None, TOKENS[:8], **whole) == PlacedBlocks(stored=names(TOKENS[:8]))
    assert cache.blocks.num_hosted == 2


def test_a_chunk_that_ends_within_a_block_is_left_out_and_one_of_too_many_blocks_is_missing(cache):
    assert cache.store([9], None, TOKENS[:6], medium="cpu", block_size=6) == b""
    assert (cache.counts.other_size, cache.blocks.gap) == (1, None)
    assert cache.store([9], None, TOKENS[:4] * 65, medium="cpu", block_size=4 * 65) == b""
    assert (cache.counts.other_size, cache.blocks.gap) == (2, "other_size")


def test_offloaded_blocks_whose_events_leave_out_the_salt_keep_their_names(cache):
    """vLLM's self-describing events of its offloading have tokens, but no extra keys."""
    salted = names(TOKENS, salt="tenant")
    cache.store([1, 2], None, TOKENS[:8], extra_keys=[["tenant"], None])
    assert cache.place([1, 2], None, TOKENS[:8], medium="CPU") == PlacedBlocks(stored=salted[:32])
    assert cache.displace([1, 2]) == PlacedBlocks(hosted=salted[:32])
    assert cache.store([1, 2, 3], None, TOKENS, medium="CPU") == salted
    assert cache.store([5], None, TOKENS[:4], extra_keys=[[["picture", 3]]]) == b""
    assert cache.store([5], None, TOKENS[:4], medium="CPU") == b""
    assert (cache.blocks.fault, cache.blocks.gap) == ("", None)


@pytest.mark.parametrize("where", [{"medium": "STORAGE"}, {"medium": "EXTERNAL"}, {"locality": "REMOTE"}])
def test_media_that_serve_no_hits_hold_nothing(cache, where):
    assert cache.store([1], None, TOKENS[:4], **where) == b""
    assert cache.counts.other_tier == 1
    cache.store([1], None, TOKENS[:4])
    assert cache.remove([1], **where) == b""
    assert cache.blocks.num_blocks == 1


def test_which_media_serve_hits_can_be_set():
    cache = Cache(tiers=("GPU", "STORAGE"))
    assert cache.store([1], None, TOKENS[:4], medium="storage") == names(TOKENS[:4])
    assert cache.store([2], None, TOKENS[4:8], medium="CPU") == b""


def test_a_salt_names_the_whole_chain(cache):
    first = cache.store([1, 2], None, TOKENS[:8], extra_keys=[["tenant"], None])
    assert first + cache.store([3], 2, TOKENS[8:], extra_keys=[None]) == names(TOKENS, salt="tenant")
    assert Cache().store([1], None, TOKENS[:4], cache_salt="tenant") == names(TOKENS[:4], salt="tenant")


def test_an_adapter_names_the_whole_chain_with_a_salt_or_without(cache):
    adapter = {"lora_id": 1, "lora_name": "sql"}
    first = cache.store([1, 2], None, TOKENS[:8], extra_keys=[["sql"], ["sql"]], **adapter)
    assert first + cache.store([3], 2, TOKENS[8:], extra_keys=[["sql"]], **adapter) == names(TOKENS, "sql")
    salted = Cache().store([1, 2], None, TOKENS[:8], extra_keys=[["sql", "sql"], ["sql"]], **adapter)
    assert salted == names(TOKENS[:8], "sql", "sql")


def test_an_adapter_without_a_name_has_no_place(cache):
    assert cache.store([1], None, TOKENS[:4], lora_id=4) == b""
    assert (cache.counts.malformed, cache.blocks.gap) == (1, "malformed")


@pytest.mark.parametrize("extra", [["picture", 3], b"digest", "salt of a later block", 7])
def test_from_a_block_with_a_picture_on_nothing_is_named(cache, extra):
    assert cache.store([1, 2, 3], None, TOKENS, extra_keys=[None, [extra], None]) == names(TOKENS[:4])
    assert cache.store([4], 3, TOKENS[:4]) == b""
    assert (cache.counts.unnamed, cache.counts.orphaned) == (3, 0)
    assert cache.store([], 4, [], extra_keys=None) == b""
    assert cache.store([5], 4, TOKENS[:4]) == b""
    assert cache.store([5, 6], None, [], medium="CPU") == b""
    assert (cache.counts.unnamed, cache.counts.orphaned, cache.blocks.gap) == (5, 1, "orphaned")


def test_extra_keys_of_another_number_than_the_blocks_are_not_believed(cache):
    assert cache.store([1, 2], None, TOKENS[:8], extra_keys=[None]) == b""
    assert (cache.counts.malformed, cache.blocks.gap) == (2, "malformed")


def test_other_sizes_are_left_out_and_reported(cache):
    assert cache.store([1], None, TOKENS, block_size=12) == b""
    assert (cache.counts.other_size, cache.blocks.block_size_seen) == (1, 12)
    assert cache.blocks.gap == "other_size"
    cache.blocks.cleared()
    assert cache.blocks.gap is None


def test_a_name_is_held_until_no_hash_of_the_engine_has_it(cache):
    pairs = [(token, token + 1) for token in TOKENS[:4]]
    other = [*pairs[:3], (3, 99)]  # EAGLE's hash covers the token behind the block, Moestro's name does not
    assert cache.store([1], None, pairs) == cache.store([2], None, other) == names(TOKENS[:4])
    assert cache.remove([1]) == b""
    assert cache.remove([2]) == names(TOKENS[:4])
    assert cache.store([1], None, pairs) == names(TOKENS[:4])
    assert cache.remove([1]) == names(TOKENS[:4])


def test_blocks_of_which_some_have_no_hash_are_left_out(cache):
    assert cache.store([1, 3], None, TOKENS) == b""
    assert (cache.counts.malformed, cache.blocks.gap) == (2, "malformed")


def test_layers_that_see_the_whole_prompt_are_followed_and_others_are_not(cache):
    assert cache.store([1], None, TOKENS[:4], group_idx=1, kv_cache_spec_kind="sliding_window") == b""
    assert cache.store([1], None, TOKENS[:4], group_idx=0, kv_cache_spec_kind="full_attention") != b""
    assert cache.store([1], None, TOKENS[:4], group_idx=2, kv_cache_spec_kind="full_attention") == b""
    assert cache.counts.other_group == 2
    assert cache.remove([1], group_idx=1) == b""
    assert cache.remove([1], group_idx=0) == names(TOKENS[:4])


def test_a_copy_that_remains_keeps_a_block(cache):
    cache.store([1, 2], None, TOKENS[:8])
    assert cache.remove([1, 2], remaining_copy_counts=[1, 0]) == names(TOKENS)[16:32]


def test_hashes_that_name_different_blocks_are_believed_no_more(cache):
    cache.store([1], None, TOKENS[:4])
    assert cache.store([2, 1], None, [7] * 4 + TOKENS[:4]) == b""
    assert cache.blocks.fault
    assert cache.blocks.num_blocks == 0
    assert cache.store([5], None, TOKENS[:4]) == b""


def test_a_cache_that_claims_more_blocks_than_allowed_is_followed_no_more():
    cache = Cache(max_num_blocks=2)
    assert cache.store([1, 2], None, TOKENS[:8]) == names(TOKENS[:8])
    assert cache.store([3], 2, TOKENS[8:]) == b""
    assert cache.blocks.fault == "it claims to hold more than 2 blocks"
    assert (cache.counts.over_bound, cache.blocks.num_blocks) == (1, 0)
    assert cache.store([1], None, TOKENS[:4]) == b""
    cache.blocks.cleared()
    assert cache.store([1], None, TOKENS[:4]) == names(TOKENS[:4])


def test_all_that_is_held_can_be_reported_again(cache):
    cache.store([1, 2, 3], None, TOKENS)
    cache.remove([2])
    assert cache.blocks.placed().stored == names(TOKENS)[:16] + names(TOKENS)[32:]


def test_nothing_of_what_was_forgotten_is_known(cache):
    cache.store([1], None, TOKENS[:4])
    cache.blocks.forget()
    assert cache.blocks.num_blocks == 0
    assert cache.store([2], 1, TOKENS[4:8]) == b""
