"""Loops of agents (call, result, answer) with unmodified clients, directly and through the router.

The fake ranks say what the last message says; after the result of a tool, they report that result.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.interrupted_answers import running
from support.model_outputs import hermes
from support.parroting_server import FLAGS, WEATHER_TOOL
from support.running import MOESTRO, Running, call

CALL = "<think>\nHm.\n</think>\n\nI look.\n" + hermes("get_weather", '{"city": "Paris"}')
SCHEMA = WEATHER_TOOL["function"]["parameters"]
CLAUDE_TOOL = {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA}
RESPONSE_TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}


@pytest.fixture(scope="module")
def parrot(fake_command, tmp_path_factory) -> Iterator[Running]:
    command = (*fake_command, *FLAGS, "hermes", "--reasoning-parser", "qwen3")
    with running(command, tmp_path_factory.mktemp("agents")) as server:
        yield server


@pytest.fixture(scope="module")
def routed(parrot, tmp_path_factory) -> Iterator[Running]:
    command = (MOESTRO, "route", "--engine", parrot.url, "--admin-port", "0")
    server = Running(command, tmp_path_factory.mktemp("route"))
    yield server
    server.kill()


@pytest.fixture(params=["direct", "routed"])
def place(request, parrot) -> Running:
    return parrot if request.param == "direct" else request.getfixturevalue("routed")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_with_anthropics_client(claude, is_streamed):
    def ask(messages):
        fields = {"model": "moestro-demo", "max_tokens": 400, "tools": [CLAUDE_TOOL], "messages": messages}
        if not is_streamed:
            return claude.messages.create(**fields)
        with claude.messages.stream(**fields) as stream:
            return stream.get_final_message()

    messages = [{"role": "user", "content": CALL}]
    answer = ask(messages)
    assert answer.stop_reason == "tool_use"
    thought, text, use = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert text.text.strip() == "I look."
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Paris"})
    messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}
    messages.append({"role": "user", "content": [result]})
    last = ask(messages)
    assert (last.stop_reason, last.content[-1].text) == ("end_turn", "The tool says sun.")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_with_openais_responses(openai_client, is_streamed):
    def ask(items):
        fields = {"model": "moestro-demo", "max_output_tokens": 400, "tools": [RESPONSE_TOOL], "input": items}
        if not is_streamed:
            return openai_client.responses.create(**fields)
        with openai_client.responses.stream(**fields) as stream:
            for _ in stream:
                pass
            return stream.get_final_response()

    items = [{"role": "user", "content": CALL}]
    answer = ask(items)
    thought, text, made = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
    assert text.content[0].text.strip() == "I look."
    assert (made.type, made.name, made.arguments) == ("function_call", "get_weather", '{"city": "Paris"}')
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    items += [item.model_dump(exclude_none=True) for item in answer.output]
    items.append({"type": "function_call_output", "call_id": made.call_id, "output": "sun"})
    last = ask(items)
    assert (last.status, last.output_text) == ("completed", "The tool says sun.")


def test_tokenize_counts_the_tools_and_a_continued_message_like_the_chat(parrot):
    """Each field that shapes a prompt counts."""
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER_TOOL]}
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        counted = call(parrot, "POST", "/tokenize", body | extra).json["count"]
        served = call(parrot, "POST", "/v1/chat/completions", body | extra | {"max_tokens": 1}).json
        assert counted == served["usage"]["prompt_tokens"]


def test_tokenize_continues_the_last_message_like_the_chat(fake):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is ("}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    counted = call(fake, "POST", "/tokenize", body).json["count"]
    served = call(fake, "POST", "/v1/chat/completions", body | {"max_tokens": 1}).json["usage"]["prompt_tokens"]
    prefilled = call(fake, "POST", "/v1/messages/count_tokens", {"messages": messages}).json["input_tokens"]
    assert counted == served == prefilled
    assert counted < call(fake, "POST", "/tokenize", {"messages": messages}).json["count"]
