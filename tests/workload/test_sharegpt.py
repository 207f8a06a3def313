import json

import pytest

from moestro.errors import ConfigError
from moestro.workload.sharegpt import estimated_tokens, read_conversations
from moestro.workload.traces import read_trace

S = 1_000_000_000


def said(*messages):
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


CONVERSATIONS = [
    said(("human", "a" * 40), ("gpt", "b" * 20), ("human", "c" * 8), ("gpt", "d" * 12), ("human", "never answered")),
    said(("gpt", "it begins with an answer"), ("human", "e" * 4), ("gpt", "f" * 4)),
    said(("human", "no answer")),
    said(("user", "g" * 5), ("chatgpt", "h")),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(CONVERSATIONS))
    return path


def test_prompts_are_what_conversations_begin_with(path):
    rows = read_trace(path)
    assert rows.texts == ("a" * 40, "g" * 5)
    assert rows.num_output_tokens.tolist() == [5, 1]
    assert rows.num_left_out == 2
    assert len(read_trace(path, 1)) == 1


def test_conversations_grow_turn_by_turn_and_each_has_its_user(path):
    sessions = read_conversations(path, 3 * S, len)
    rows = sessions.rows
    assert rows.session.tolist() == [0, 0, 1, 2]
    assert rows.num_prompt_tokens.tolist() == [40, 68, 28, 5], "an answer to nothing is part of what follows"
    assert rows.num_output_tokens.tolist() == [20, 12, 4, 1]
    assert sessions.think_ns.tolist() == [0, 3 * S, 0, 0]
    assert rows.user.tolist() == rows.session.tolist()
    assert len(read_conversations(path, 0, limit=2)) == 2


def test_a_token_is_taken_for_four_characters():
    assert [estimated_tokens("x" * n) for n in (0, 1, 4, 5)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{}", "expected a JSON array"),
        ('[{"conversations": [{"from": "human"}]}]', "missing required field `value`"),
        ("[]", "no conversation|no answered question"),
        (json.dumps([CONVERSATIONS[2]]), "no conversation|no answered question"),
    ],
)
def test_other_documents_are_refused(tmp_path, document, words):
    path = tmp_path / "t.json"
    path.write_text(document)
    for read in (read_trace, lambda each: read_conversations(each, 0)):
        with pytest.raises(ConfigError, match=words):
            read(path)
