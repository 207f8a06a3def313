import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.workload.generated.draws import WORDS, PromptKey, text, token_ids
from moestro.workload.rows import Rows, equal_rows

KEY = PromptKey(3, 1)


def hashed(lengths, hash_ids, block_size=4):
    return Rows(
        num_prompt_tokens=np.array(lengths, np.int64),
        num_output_tokens=np.ones(len(lengths), np.int64),
        hash_ids=tuple(np.array(ids, np.int64) for ids in hash_ids),
        block_size=block_size,
    )


@given(st.data())
def test_two_prompts_share_exactly_the_blocks_whose_ids_they_share(data):
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)
    hash_ids = data.draw(st.lists(ids, min_size=2, max_size=2))
    lengths = [data.draw(st.integers(8 * len(one) - 7, 8 * len(one) + 3)) for one in hash_ids]
    rows = hashed(lengths, hash_ids, 8)
    prompts = [token_ids(rows, i, 2**31 - 1, KEY) for i in (0, 1)]
    assert [len(prompt) for prompt in prompts] == lengths
    for i, first in enumerate(hash_ids[0]):
        for j, second in enumerate(hash_ids[1]):
            left, right = prompts[0][8 * i : 8 * i + 8], prompts[1][8 * j : 8 * j + 8]
            both = min(len(left), len(right))
            if first == second:
                assert (left[:both] == right[:both]).all()
            else:
                assert not set(left.tolist()) & set(right.tolist())


def test_what_has_no_hash_id_is_the_requests_own():
    rows = hashed([6, 6], [[5], [5]])
    first, second = (token_ids(rows, i, 2**31 - 1, KEY) for i in (0, 1))
    assert (first[:4] == second[:4]).all()
    assert (first[4:] != second[4:]).all()


def test_random_prompts_share_exactly_the_requested_prefix():
    rows = equal_rows(2, 10, 1, 6)
    first, second = (token_ids(rows, i, 2**31 - 1, KEY) for i in (0, 1))
    assert len(first) == 16
    assert (first[:6] == second[:6]).all()
    assert (first[6:] != second[6:]).all()


@pytest.mark.parametrize("other", [PromptKey(3, 2), PromptKey(4, 1)])
def test_another_run_or_seed_gives_another_prompt_and_the_same_key_the_same(other):
    rows = equal_rows(1, 40, 1, 10)
    prompt = token_ids(rows, 0, 2**31 - 1, KEY)
    assert (prompt == token_ids(rows, 0, 2**31 - 1, KEY)).all()
    assert (prompt != token_ids(rows, 0, 2**31 - 1, other)).all()


def test_token_ids_cover_the_vocabulary_and_stay_within():
    ids = token_ids(equal_rows(1, 20_000, 1), 0, 100, KEY)
    assert ids.dtype == np.int32
    counts = np.bincount(ids)
    assert len(counts) == 100
    assert counts.min() > 100


def test_a_text_has_a_word_a_token_or_is_the_files_own():
    assert len(text(equal_rows(1, 12, 1), 0, KEY).split()) == 12
    assert len(set(WORDS)) == len(WORDS)
    rows = Rows(np.zeros(1, np.int64), np.ones(1, np.int64), texts=("as it stands",))
    assert text(rows, 0, KEY) == "as it stands"
