"""Rows as requests: block names against their twin, the hashes of the same prompts written out as tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.hashing import HASH_BYTES, hash_blocks, hash_key, split_hashes
from moestro.core.request import ServiceClass
from moestro.errors import ConfigError
from moestro.workload.generated.draws import PromptKey, token_ids
from moestro.workload.rows import RequestForm, RequestMaker, Rows, Streams, equal_rows

KEY = hash_key("a model")
PROMPTS = PromptKey(3, 1)


def columns(values):
    return np.array(values, np.int64)


@st.composite
def forests(draw):
    """Requests that are beginnings of streams, up to three deep."""
    parent, start = [], []
    for number in range(draw(st.integers(1, 6))):
        above = draw(st.integers(-1, number - 1))
        parent.append(above)
        start.append(0 if above < 0 else start[above] + draw(st.integers(0, 20)))
    rows = draw(st.lists(st.tuples(st.integers(0, len(parent) - 1), st.integers(1, 60)), min_size=1, max_size=6))
    return Rows(
        num_prompt_tokens=columns([length for _, length in rows]),
        num_output_tokens=np.ones(len(rows), np.int64),
        streams=Streams(columns(parent), columns(start)),
        stream=columns([stream for stream, _ in rows]),
    )


@st.composite
def hashed_traces(draw):
    """A trace of chained ids in blocks of 8, the last, partial block with or without one."""
    tree = {}
    lengths, chains = [], []
    for _ in range(draw(st.integers(1, 5))):
        branch = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        chain = [tree.setdefault(tuple(branch[: i + 1]), len(tree)) for i in range(len(branch))]
        lengths.append(8 * len(chain) + draw(st.integers(-7, 7)))
        chains.append(columns(chain))
    ones = np.ones(len(lengths), np.int64)
    return Rows(columns(lengths), ones, hash_ids=tuple(chains), block_size=8)


@given(st.one_of(forests(), hashed_traces(), st.builds(equal_rows, st.integers(1, 4), st.integers(1, 40), st.just(1))),
       st.sampled_from([1, 2, 4, 8, 16]))  # fmt: skip
def test_names_are_equal_where_the_hashes_of_the_written_out_prompts_are(rows, block_size):
    maker = RequestMaker(rows, RequestForm(block_size=block_size, hash_key=KEY))
    name_of, hash_of = {}, {}
    for i in range(len(rows)):
        request, _ = maker.make(i, 0)
        hashes = split_hashes(hash_blocks(KEY, token_ids(rows, i, 2**31 - 1, PROMPTS), block_size))
        names = split_hashes(request.block_hashes)
        assert len(names) == len(hashes) == request.num_prompt_tokens // block_size
        for name, block_hash in zip(names, hashes, strict=True):
            assert hash_of.setdefault(name, block_hash) == block_hash
            assert name_of.setdefault(block_hash, name) == name


def conversation():
    """Two turns: 40 tokens of prompt, 30 of answer, 20 of new input."""
    return Rows(
        num_prompt_tokens=columns([40, 90]),
        num_output_tokens=columns([30, 5]),
        streams=Streams(columns([-1]), columns([0])),
        stream=columns([0, 0]),
        session=columns([4, 4]),
        user=columns([2, 2]),
        is_ls=np.array([True, False]),
    )


def test_the_next_turn_finds_the_blocks_of_the_answer():
    maker = RequestMaker(conversation(), RequestForm(block_size=16))
    (first, script), (second, _) = maker.timed(columns([10, 20]))
    assert len(first.block_hashes) == 2 * HASH_BYTES
    assert len(script.block_hashes) == (70 // 16 - 2) * HASH_BYTES
    assert second.block_hashes.startswith(first.block_hashes + script.block_hashes)


def test_who_asks_and_of_which_class_is_carried_and_the_answers_length_is_not():
    maker = RequestMaker(conversation(), RequestForm(block_size=16, name="chat"))
    (first, script), (second, _) = maker.timed(columns([10, 20]))
    assert (first.user, first.session_id, first.service_class) == ("user-2", "session-4", ServiceClass.LS)
    assert (second.request_id, second.arrival_ns, second.service_class) == ("chat-1", 20, ServiceClass.BE)
    assert script.num_output_tokens == 30
    assert first.sampling.max_tokens == second.sampling.max_tokens == 30
    assert first.token_ids is None


def test_a_row_made_alone_or_twice_is_the_same():
    maker = RequestMaker(conversation(), RequestForm(block_size=8))
    assert maker.make(1, 5) == list(maker.timed(columns([0, 5])))[1]


def test_another_key_gives_other_names_and_no_caching_none():
    names = [
        RequestMaker(equal_rows(1, 64, 1), form).make(0, 0)[0].block_hashes
        for form in (
            RequestForm(block_size=16, hash_key=KEY),
            RequestForm(block_size=16, hash_key=hash_key("another")),
            RequestForm(block_size=16, names_blocks=False),
        )
    ]
    assert not set(split_hashes(names[0])) & set(split_hashes(names[1]))
    assert names[2] == b""


def test_prompts_of_lengths_alone_share_nothing():
    maker = RequestMaker(equal_rows(50, 64, 1), RequestForm(block_size=16))
    names = [name for request, _ in maker.timed(np.arange(50)) for name in split_hashes(request.block_hashes)]
    assert len(set(names)) == len(names) == 200


@pytest.mark.parametrize(
    ("rows", "block_size", "words"),
    [
        (Rows(columns([9]), columns([1]), hash_ids=(columns([1, 2]),), block_size=8), 6, "blocks of 8 tokens.*of 6"),
        (Rows(columns([0]), columns([1]), texts=("a",)), 8, "prompts as text"),
        (equal_rows(0, 1, 1), 8, "no requests"),
    ],
)
def test_rows_that_cannot_become_requests_are_refused(rows, block_size, words):
    with pytest.raises(ConfigError, match=words):
        RequestMaker(rows, RequestForm(block_size=block_size))


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"max_tokens": 0}, {"hash_key": b"short"}])
def test_a_form_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="must"):
        RequestForm(**{"block_size": 16} | wrong)
