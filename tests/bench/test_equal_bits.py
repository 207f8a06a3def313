"""`bench/robustness/equal_bits.py`: its requests, and what it takes for a difference."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "robustness" / "equal_bits.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def answer(logprob: float = -0.5, **changes: object) -> dict:
    choice = {"index": 0, "text": "ab", "token_ids": [5, 6], "finish_reason": "length"}
    return {"id": "cmpl-1", "choices": [choice | {"logprobs": {"token_logprobs": [logprob]}} | changes]}


def test_the_seed_decides_requests_of_every_kind(script):
    requests = script.make_requests(1, 200)
    assert requests == script.make_requests(1, 200)
    assert requests != script.make_requests(2, 200)
    for name in (
        "messages",
        "prompt",
        "echo",
        "n",
        "prompt_logprobs",
        "structured_outputs",
        "response_format",
        "top_p",
    ):
        assert any(name in body for _, body in requests), name
    prompts = [len(body["prompt"]) for _, body in requests if "prompt" in body]
    assert min(prompts) < 4
    assert max(prompts) == script.LONGEST_PROMPT


@pytest.mark.parametrize(
    ("other", "place"),
    [
        (answer(), None),
        (answer() | {"id": "cmpl-2"}, None),
        (answer(-0.5000001), "answer.choices[0].logprobs.token_logprobs[0]: -0.5 and -0.5000001"),
        (answer(token_ids=[5, 7]), "answer.choices[0].token_ids[1]: 6 and 7"),
        (answer(token_ids=[5]), "answer.choices[0].token_ids: [5, 6] and [5]"),
        ({"error": {"code": "engine_died"}}, "answer: "),
    ],
)
def test_the_first_difference_is_named(script, other, place):
    found = script.first_difference(script.essence(answer()), script.essence(other))
    assert found is None if place is None else found.startswith(place)


def test_a_stream_shows_texts_tokens_and_ends(script):
    chat = {"choices": [{"index": 0, "message": {"content": "ab"}, "token_ids": [5, 6], "finish_reason": "stop"}]}
    assert script.streamed(answer()) == {0: ["ab", [5, 6], "length"]}
    assert script.streamed(chat) == {0: ["ab", [5, 6], "stop"]}
