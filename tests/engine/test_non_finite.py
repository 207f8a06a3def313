"""A sequence whose logits are not finite ends alone, and leaves nothing in the prefix cache under its names."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support import fake_device

from moestro.core.request import FinishReason
from moestro.engine.rank import CacheEvents, RemovedBlocks, StoredBlocks, build_rank
from moestro.engine.settings import SchedulerSettings

POISON = fake_device.VOCAB_SIZE + 1  # which it never answers itself


class PoisonedDevice(fake_device.KvDevice):
    """Answers that logits are not finite where the sequence, as it stands in the KV pool, contains POISON."""

    def _read_all(self, units):
        result = super()._read_all(units)
        ends = units.start + units.num_tokens
        rows = [
            row
            for row, (table, end) in enumerate(zip(units.block_tables, ends.tolist(), strict=True))
            if units.logits[row] and POISON in self.kv[table].reshape(-1)[:end]
        ]
        return msgspec.structs.replace(result, non_finite=np.array(rows, np.int64) if rows else None)


@pytest.fixture
def rank():
    settings = SchedulerSettings(
        num_blocks=32, block_size=4, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=8
    )
    return build_rank(settings, PoisonedDevice(32, 4))


def run(rank, *requests) -> dict:
    """Return the outputs of each request."""
    outputs = {request.request_id: [] for request in requests}
    for request in requests:
        rank.add(request, 0)
    for now_ns in range(200):
        for output in rank.step(now_ns):
            outputs[output.request_id].append(output)
        rank.scheduler.check()
    assert not rank.has_work
    assert rank.scheduler.pool.num_free == 32
    return outputs


def request(name, tokens, **fields):
    return fake_device.make_request(name, tokens, **{"max_tokens": 6} | fields)


def is_failed(outputs) -> bool:
    [output] = outputs
    return (output.finish_reason, output.token_ids) == (FinishReason.NON_FINITE, ())


def test_it_ends_once_without_a_token_and_the_others_have_all_of_theirs(rank):
    clean = [request(f"clean {i}", range(i, i + 9)) for i in range(3)]
    outputs = run(rank, clean[0], request("poisoned", [*range(9), POISON, *range(9)]), *clean[1:])
    assert is_failed(outputs["poisoned"])
    for each in clean:
        tokens = [token for output in outputs[each.request_id] for token in output.token_ids]
        assert tokens == fake_device.expected_tokens(each)


def test_an_equal_prompt_is_computed_again_from_its_first_token(rank):
    run(rank, request("prefix", range(8)))
    tokens = [*range(8), POISON, *range(11)]  # two good blocks from the cache, and three of its own
    for name in ("first", "second"):
        outputs = run(rank, request(name, tokens))
        assert is_failed(outputs[name])
        assert outputs[name][0].num_cached_tokens == (8 if name == "first" else 0)


def test_blocks_that_another_sequence_stored_under_its_names_are_forgotten_too(rank):
    tokens = [POISON, *range(11)]
    aborted = request("left in mid-prompt", tokens)
    rank.add(aborted, 0)
    for _ in range(2):
        rank.step(0)  # its first chunk is in the cache, and no client has seen logits of it
    rank.abort("left in mid-prompt", 0)
    [once] = run(rank, request("scored", tokens, prompt_logprobs=0, max_tokens=0))["scored"]  # reads no cache
    assert once.finish_reason is FinishReason.NON_FINITE
    assert run(rank, request("next", tokens))["next"][0].num_cached_tokens == 0


def test_a_follower_of_the_prefix_cache_receives_each_block_that_is_forgotten(rank):
    events = CacheEvents(rank.scheduler)
    run(rank, request("poisoned", [POISON, *range(19)]))
    stored, removed = set(), set()
    for event in events.take():
        match event:
            case StoredBlocks(names=names):
                stored.update(names)
            case RemovedBlocks(names):
                removed.update(names)
    assert stored == removed
    assert stored


def test_one_that_was_aborted_in_flight_leaves_without_a_word(rank):
    rank.add(request("poisoned", [POISON, 1, 2]), 0)
    rank.begin(0)
    rank.abort("poisoned", 0)
    assert [output for now_ns in range(9) for output in rank.step(now_ns)] == []
    assert not rank.has_work
    rank.scheduler.check()
