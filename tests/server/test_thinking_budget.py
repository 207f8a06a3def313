"""Budgets of reasoning with a real engine: what follows the forced end is what the model writes there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.running import EXACT, Running, call, chat, complete, is_idle, routing

BUDGET, LENGTH = 5, 30
FIELDS = {"temperature": 0, "max_tokens": LENGTH, "thinking_token_budget": BUDGET, "return_token_ids": True}


@pytest.fixture(scope="module")
def direct(real_command, tmp_path_factory) -> Iterator[Running]:
    flags = (*EXACT, "--reasoning-parser", "deepseek_r1")
    server = Running((*real_command, *flags), tmp_path_factory.mktemp("serve"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def routed(direct, tmp_path_factory) -> Iterator[Running]:
    with routing(direct, tmp_path_factory.mktemp("route")) as router:
        yield router


@pytest.fixture(params=["direct", "routed"])
def place(request) -> Running:
    return request.getfixturevalue(request.param)


def test_the_answer_after_a_forced_end_is_the_models_own(place):
    answer = chat(place, "def f(x):", **FIELDS).json
    ids = answer["choices"][0]["token_ids"]
    end = call(place, "POST", "/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json["tokens"]
    before = BUDGET + 1 + len(end)  # The first token of reasoning without a start tag does not count.
    assert ids[BUDGET + 1 : before] == end
    prompt = answer["prompt_token_ids"] + ids[:before]
    rest = complete(place, prompt=prompt, temperature=0, max_tokens=LENGTH - before, return_token_ids=True)
    assert rest.json["choices"][0]["token_ids"] == ids[before:]
    assert len(ids) == answer["usage"]["completion_tokens"] == LENGTH
    streamed = chat(place, "def f(x):", **FIELDS, stream=True).events[:-1]
    assert [i for event in streamed for choice in event["choices"] for i in (choice.get("token_ids") or ())] == ids


def test_a_grammar_holds_after_a_forced_end(place):
    reply = chat(place, "def f(x):", **FIELDS, structured_outputs={"regex": "[ab]{4}"}).json["choices"][0]
    assert set(reply["message"]["content"]) <= set("ab")
    assert (len(reply["message"]["content"]), reply["finish_reason"]) == (4, "stop")


def test_no_sequence_is_left_when_budgets_have_ended_several_choices(place):
    reply = chat(place, "def f(x):", **FIELDS | {"temperature": 1}, n=3, seed=3)
    assert all(choice["message"]["content"] for choice in reply.json["choices"])
    assert reply.json["usage"]["completion_tokens"] <= 3 * LENGTH


def test_the_engines_are_idle_at_the_end(direct):
    assert is_idle(direct)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_budget_ends_the_thinking_as_the_chats_does(place, claude, is_streamed):
    variables = {"enable_thinking": True, "thinking": True}
    expected = chat(place, "def f(x):", **FIELDS, chat_template_kwargs=variables).json["choices"][0]["message"]
    fields = {
        "model": "moestro-demo", "max_tokens": LENGTH, "extra_body": {"temperature": 0},
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        "messages": [{"role": "user", "content": "def f(x):"}],
    }  # fmt: skip
    if is_streamed:
        with claude.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
    else:
        answer = claude.messages.create(**fields)
    thought, text = answer.content
    assert (thought.thinking, text.text) == (expected["reasoning"], expected["content"])
    unlimited = claude.messages.create(**fields | {"thinking": {"type": "disabled", "budget_tokens": BUDGET}})
    assert [block.type for block in unlimited.content] == ["thinking"]  # Its template ignores the wish.


@pytest.mark.parametrize("budget", [0, -1, -(2**40), 2**31])
def test_anthropics_budget_is_refused_by_its_name(place, budget):
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    reply = call(place, "POST", "/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": budget}})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("thinking.budget_tokens must be between 1 and 2147483647, got")


def test_a_budget_on_a_model_without_reasoning_is_named_and_changes_nothing(server):
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    reply = call(server, "POST", "/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": 2000}})
    assert (reply.status, reply.headers["warning"]) == (
        200, '299 moestro "fields were ignored: thinking.budget_tokens"',
    )  # fmt: skip
