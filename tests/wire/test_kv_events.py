import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_publisher import END, frames, payload, removed, replay_frames, stored

from moestro.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEventError,
    UnknownEvent,
    UnreadableRemoval,
    UnreadableStore,
    decode_batch,
    decode_event,
    decode_frames,
    text_of,
)

EVENTS = (
    stored([11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], extra_keys=[["salt"], None], group_idx=0),
    removed([b"\x01" * 32], group_idx=0),
    {"type": "AllBlocksCleared"},
)


def pack(*raw: object) -> bytes:
    return msgspec.msgpack.encode(list(raw))


def events_of(batch: EventBatch) -> list:
    return [decode_event(encoded) for encoded in batch.events]


@pytest.mark.parametrize("arrays", [False, True], ids=["maps", "arrays"])
def test_both_encodings_of_vllm_say_the_same(arrays):
    batch = decode_batch(payload(*EVENTS, rank=3, ts=2.5, arrays=arrays))
    first, second, third = events_of(batch)
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.block_size) == ([11, 12], None, 4)
    assert [[text_of(each) for each in extras or ()] for extras in first.extra_keys] == [["salt"], []]
    assert second == BlockRemoved([b"\x01" * 32], "GPU", 0)
    assert third == AllBlocksCleared()
    assert (batch.ts_s, batch.dp_rank) == (2.5, 3)


def test_sglang_says_the_salt_in_a_map_among_the_values_or_under_its_own_key():
    old = pack(1.0, [["BlockStored", [-5], None, [1, 2], 2, None, "CPU_PINNED", {"cache_salt": "s"}]], 1)
    new = pack(1.0, [stored([-5], None, [1, 2], cache_salt="s", session_id="x", lora_name="a")], 1)
    for body, adapter in ((old, None), (new, "a")):
        (event,) = events_of(decode_batch(body))
        assert (event.block_hashes, event.cache_salt, event.lora_name) == ([-5], "s", adapter)
    assert events_of(decode_batch(old))[0].medium == "CPU_PINNED"


@pytest.mark.parametrize("arrays", [False, True], ids=["maps", "arrays"])
def test_pairs_of_tokens_are_read_as_tokens(arrays):
    pairs = [[5, 6], [6, 7], [7, 8], [8, 9]]
    (event,) = events_of(decode_batch(payload(stored([101], None, pairs), arrays=arrays)))
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.block_size) == ([5, 6, 7, 8], 4)


@pytest.mark.parametrize("bad", [[[1, 2], [3, 4]], [[1, 2], 2], [1, [2, 3]], [[1, 2, 3]], [[1]], [[1, -2]], ["1"]])
def test_pairs_that_do_not_overlap_and_mixtures_cannot_be_read(bad):
    for arrays in (False, True):
        (event,) = events_of(decode_batch(payload(stored([1], None, bad), arrays=arrays)))
        assert event == UnreadableStore()


def test_the_first_versions_had_neither_media_nor_ranks():
    batch = decode_batch(pack(1.0, [["BlockStored", [1], None, [1, 2], 2, None], ["BlockRemoved", [1]]]))
    assert [event.medium for event in events_of(batch)] == [None, None]
    assert batch.dp_rank is None


def test_what_is_new_is_passed_over_and_counted():
    event = stored([1], None, [1, 2, 3, 4], event_version=9, ownership={"a": 1})
    batch = decode_batch(payload(event, {"type": "BlockBlessed", "block_hashes": [1]}, {"what": 1}))
    assert [type(each) for each in events_of(batch)] == [BlockStored, UnknownEvent, UnknownEvent]


def test_a_batch_may_be_a_map_too():
    body = msgspec.msgpack.encode({"ts": 1, "events": [removed([1])], "data_parallel_rank": 2})
    batch = decode_batch(body)
    assert (batch.ts_s, batch.dp_rank, len(batch.events)) == (1.0, 2, 1)


def test_unreadable_stored_blocks_are_left_out_and_unreadable_removals_reported():
    pairs = stored([1], None, [[1, 2], [3, 4]])  # SGLang's overlap
    huge = stored([1], None, [1 << 31] * 4)
    batch = decode_batch(payload(pairs, huge, {"type": "BlockRemoved"}, removed([1.5])))
    assert events_of(batch) == [UnreadableStore()] * 2 + [UnreadableRemoval()] * 2


@pytest.mark.parametrize("body", [b"", b"\xc1", pack(1.0), pack("then", []), pack(1.0, "none"), b"\x01"])
def test_what_is_no_batch_is_refused(body):
    with pytest.raises(KvEventError):
        decode_batch(body)


@given(st.binary(max_size=64))
def test_whatever_comes_is_decoded_or_refused(body):
    with contextlib.suppress(KvEventError):
        decode_batch(body)


@settings(max_examples=60)
@given(
    st.lists(
        st.recursive(
            st.none() | st.integers(-5, 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=3) | st.floats(),
            lambda inner: (
                st.lists(inner, max_size=8)
                | st.dictionaries(st.sampled_from(["type", "block_hashes", "token_ids", "x"]), inner)
            ),
            max_leaves=20,
        ),
        max_size=4,
    ),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
)
def test_whatever_values_an_event_has_it_is_decoded_left_out_or_reported(values, name):
    batch = decode_batch(pack(1.0, [[name, *values], {"type": name, "block_hashes": values, 3: values}]))
    _, damaged = events_of(batch)
    assert damaged == UnreadableRemoval()  # a map that cannot be read may be a removal


def test_messages_live_and_replayed_by_old_and_new_publishers():
    for message in (frames(7, b"x"), replay_frames(7, b"x"), replay_frames(7, b"x", has_topic=False)):
        assert decode_frames(message) == (7, b"x")
    assert decode_frames(END) == decode_frames([b"", END[2], b""]) == (None, b"")


@pytest.mark.parametrize("message", [[], [b"x"], [b"topic", b"seq", b"x"], [b"topic", b"x"]])
def test_other_messages_are_refused(message):
    with pytest.raises(KvEventError, match="sequence number"):
        decode_frames(message)
