import json

import pytest

from moestro.errors import ConfigError
from moestro.workload.traces.reading import estimated_tokens, read_trace

S = 1_000_000_000


def conversation(*messages):
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


CONVERSATIONS = [
    conversation(
        ("human", "a" * 40), ("gpt", "b" * 20), ("human", "c" * 8), ("gpt", "d" * 12), ("human", "never answered")
    ),
    conversation(("gpt", "it begins with an answer"), ("human", "e" * 4), ("gpt", "f" * 4)),
    conversation(("human", "no answer")),
    conversation(("user", "g" * 5), ("chatgpt", "h")),
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


def test_a_token_is_taken_for_four_characters():
    assert [estimated_tokens("x" * n) for n in (0, 1, 4, 5)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{}", "expected a JSON array"),
        ('[{"conversations": [{"from": "human"}]}]', "missing required field `value`"),
        ("[]", "no conversation"),
        (json.dumps([CONVERSATIONS[2]]), "no conversation"),
    ],
)
def test_other_documents_are_refused(tmp_path, document, words):
    path = tmp_path / "t.json"
    path.write_text(document)
    with pytest.raises(ConfigError, match=words):
        read_trace(path)
