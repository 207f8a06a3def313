import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.hashing import HASH_BYTES, ROOT, block_hash, hash_blocks, hash_key, split_hashes

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_a_hash(ids, block_size):
    packed = hash_blocks(b"key", np.array(ids, np.int32), block_size)
    assert len(packed) == len(ids) // block_size * HASH_BYTES


@given(tokens, tokens, st.integers(1, 8))
def test_two_prompts_share_hashes_exactly_as_far_as_they_share_blocks(a, b, block_size):
    ours, theirs = (split_hashes(hash_blocks(b"key", np.array(x, np.int32), block_size)) for x in (a, b))
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (i + 1) * block_size
        assert (one == other) == (a[:end] == b[:end])


def test_the_chain_can_be_extended_block_by_block():
    ids = np.arange(12, dtype=np.int32)
    parent = ROOT
    for i, expected in enumerate(split_hashes(hash_blocks(b"key", ids, 4))):
        parent = block_hash(b"key", parent, ids[4 * i : 4 * i + 4])
        assert parent == expected


def test_model_adapter_and_salt_separate_keys_and_none_is_not_empty():
    names = [
        ("m", None, None),
        ("m", "a", None),
        ("m", None, "a"),
        ("ma", None, None),
        ("m", "", None),
        ("m", None, ""),
    ]
    assert len({hash_key(*name) for name in names}) == len(names)


def test_a_hash_does_not_depend_on_the_machines_byte_order_or_run():
    packed = hash_blocks(hash_key("model"), np.arange(4, dtype=np.int32), 4)
    assert packed.hex() == "eeda8a74aeb1bf7c730c2f448919af18"
