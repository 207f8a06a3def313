"""Calls of tools and reasoning through the real API server, before fake ranks that say what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.interrupted_answers import kill_an_engine, running, tokens_come, total
from support.model_outputs import ANSWERS, BROKEN, hermes
from support.parroting_server import FLAGS, TOOLS, WEATHER_TOOL, joined, say, whole, without_ids
from support.running import EXACT, MOESTRO, Running, call, metrics

LARGE = [{"type": "function", "function": {"name": "f", "parameters": {"description": "x" * (1 << 17)}}}]
CALL = hermes("get_weather", '{"city": "Paris"}')
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def server(fake_command, tmp_path_factory) -> Iterator[Running]:
    command = (*fake_command, *FLAGS, "hermes", "--reasoning-parser", "qwen3")
    with running(command, tmp_path_factory.mktemp("tools")) as server:
        yield server


def answer(server, text: str, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same as a stream."""
    fields = {"tools": TOOLS} | fields
    message = whole(say(server, text, **fields))
    assert without_ids(joined(say(server, text, **fields, stream=True))) == without_ids(message)
    return message


def error(reply) -> tuple[int, str, str]:
    return reply.status, reply.json["error"]["param"], reply.json["error"]["message"]


# --- answers


def test_a_call_has_an_id_a_name_and_arguments(server):
    message = answer(server, f"{THOUGHT}I look.\n{CALL}\n{hermes('ping', '{}')}")
    assert message["content"] == "I look."
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    first, second = message["tool_calls"]
    assert (first["name"], json.loads(first["arguments"])) == ("get_weather", {"city": "Paris"})
    assert (second["name"], second["arguments"]) == ("ping", "{}")
    assert first["id"] != second["id"]
    assert message["finish_reason"] == "tool_calls"


def test_a_message_with_nothing_but_calls_has_no_content(server):
    [choice] = say(server, CALL, tools=TOOLS).json["choices"]
    assert {name for name, value in choice["message"].items() if value is not None} == {"role", "tool_calls"}
    assert choice["message"]["tool_calls"][0].keys() == {"function", "id", "type"}


@pytest.mark.parametrize("text", [text for text, _ in ANSWERS["hermes"] + BROKEN["hermes"] if len(text) < 250])
def test_recorded_answers_arrive_whole_and_streamed_and_none_ends_with_an_error(server, text):
    expected = next(parsed for each, parsed in ANSWERS["hermes"] + BROKEN["hermes"] if each == text)
    message = answer(server, text)
    assert message["content"] == expected.content
    assert tuple((call["name"], call["arguments"]) for call in message["tool_calls"]) == expected.calls


def test_an_answer_that_is_cut_within_a_call_says_so(server):
    message = answer(server, CALL, max_tokens=20)
    assert message["finish_reason"] == "length"
    assert message["tool_calls"][0]["name"] == "get_weather"


def test_without_tools_or_with_the_choice_of_none_text_is_not_parsed(server):
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message = answer(server, CALL, **fields)
        assert message["content"] == CALL
        assert (message["tool_calls"], message["finish_reason"]) == ([], "stop")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_alone_are_called(server):
    text = f"{CALL}\n{hermes('ping', '{}')}"
    message = answer(server, text, tool_choice=allowed("auto", "ping"))
    assert [each["name"] for each in message["tool_calls"]] == ["ping"]
    assert message["content"] == CALL
    assert len(answer(server, text, tool_choice=allowed("auto", "ping", "get_weather"))["tool_calls"]) == 2


def test_one_call_where_parallel_ones_are_not_wanted(server):
    message = answer(server, f"{CALL}{hermes('ping', '{}')}", parallel_tool_calls=False)
    assert [call["name"] for call in message["tool_calls"]] == ["get_weather"]


def test_every_choice_has_its_own_calls(server):
    reply = say(server, CALL, tools=TOOLS, n=3)
    calls = [choice["message"]["tool_calls"][0] for choice in reply.json["choices"]]
    assert len({each["id"] for each in calls}) == 3


def test_usage_counts_the_tokens_of_the_reasoning(server, tokenizer):
    usage = say(server, f"{THOUGHT}Hi").json["usage"]
    most = len(tokenizer.encode("<think>\nHm.\n</think>", add_special_tokens=False))
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < most
    assert say(server, "Hi").json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    *_, last, _ = say(server, f"{THOUGHT}Hi", stream=True, stream_options={"include_usage": True}).events
    assert last["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_reasoning_can_be_hidden(server):
    message = answer(server, f"{THOUGHT}Hi", include_reasoning=False)
    assert (message["content"], message["reasoning"]) == ("Hi", "")


def test_an_effort_opens_the_reasoning_in_the_prompt(server):
    message = answer(server, "Hm.</think>Hi", reasoning_effort="high")
    assert (message["content"], message["reasoning"]) == ("Hi", "Hm.")
    message = answer(server, "Hm.</think>Hi", chat_template_kwargs={"enable_thinking": True})
    assert message["reasoning"] == "Hm."
    assert answer(server, "Hi", reasoning_effort="none")["content"] == "Hi"


# --- requests


def test_an_agents_loop_with_an_unmodified_client(server, openai):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": f"{THOUGHT}I look.\n{CALL}"}]
        params = {"model": "moestro-demo", "tools": [WEATHER_TOOL], "max_tokens": 300}
        with client.chat.completions.stream(messages=messages, **params) as stream:
            reported = stream.get_final_completion().choices[0]
        assert reported.finish_reason == "tool_calls"
        [made] = reported.message.tool_calls
        assert json.loads(made.function.arguments) == {"city": "Paris"}
        messages.append(reported.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages.append({"role": "tool", "tool_call_id": made.id, "content": [{"type": "text", "text": "21 degrees"}]})
        final = client.chat.completions.create(messages=messages, **params).choices[0]
    assert final.message.content == "The tool says 21 degrees."
    assert final.message.tool_calls == []
    assert final.finish_reason == "stop"


def test_history_reaches_the_template_with_arguments_as_objects(fake_command, tmp_path):
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ color }}<|im_end|>"
    kwargs = ("--default-chat-template-kwargs", '{"color": "red"}')
    flags = ("--chat-template", template, *kwargs, "--no-enable-auto-tool-choice")
    made = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"x": 1}', "{")]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": made, "reasoning_content": "Hm."},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
    ]
    with running((*fake_command, *flags), tmp_path) as server:
        body = {"messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 900}
        reported = call(server, "POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        reader = json.JSONDecoder()
        (assistant, tool), end = reader.raw_decode(reported)
        tools, last = reader.raw_decode(reported, end)
        assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == [{"x": 1}, {}]
        assert assistant["reasoning"] == assistant["reasoning_content"] == "Hm."
        assert (tool["content"], tool["tool_call_id"]) == ("1\n2", "a")
        assert tools == TOOLS
        assert reported[last:] == "red"
        body |= {"chat_template_kwargs": {"color": "blue"}}
        assert (
            call(server, "POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"][last:] == "blue"
        )
        status, param, text = error(say(server, "hi", tools=TOOLS))
        assert (status, param) == (400, "tool_choice")
        assert "--no-enable-auto-tool-choice" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": allowed("auto", "other")}, "tool_choice.allowed_tools.tools[0]"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("always", "ping")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "tools": LARGE}, "tools"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server, fields, param):
    status, named, _ = error(say(server, "hi", **{"tools": TOOLS} | fields))
    assert (status, named) == (400, param)


def test_an_effort_that_no_template_reads_is_left_out_and_named(fake):
    reply = say(fake, "hi", reasoning_effort="high", max_tokens=2)
    assert (reply.status, reply.headers["warning"]) == (200, '299 moestro "fields were ignored: reasoning_effort"')
    assert "warning" not in say(fake, "hi", reasoning_effort="medium", max_tokens=2).headers


def test_the_final_message_can_be_continued(fake):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3}
    continued = call(fake, "POST", "/v1/chat/completions", body).json["usage"]["prompt_tokens"]
    new, bare = (
        call(fake, "POST", "/v1/chat/completions", {**body, "continue_final_message": False, **more}).json["usage"]
        for more in ({}, {"add_generation_prompt": False})
    )
    assert continued < bare["prompt_tokens"] < new["prompt_tokens"]


def test_a_template_of_a_request_needs_the_operators_trust(fake_command, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("file {{ messages[0].content }}<|im_end|>")
    with running((*fake_command, "--chat-template", str(file), "--trust-request-chat-template"), tmp_path) as server:
        assert whole(say(server, "hi"))["content"] == "file hi"
        assert whole(say(server, "hi", chat_template="{{ messages[0].content }}!<|im_end|>"))["content"] == "hi!"


# --- the router, and engines that end


@pytest.fixture(scope="module")
def routed(fake_command, tmp_path_factory) -> Iterator[tuple[Running, Running]]:
    """A router, and the server with two engines behind it."""
    flags = ("hermes", "--reasoning-parser", "qwen3", "--engines", "2", "--route-policy", "round_robin", *EXACT)
    with (
        running((*fake_command, *FLAGS, *flags), tmp_path_factory.mktemp("engines")) as server,
        running((MOESTRO, "route", "--engine", server.url), tmp_path_factory.mktemp("router")) as router,
    ):
        yield router, server


def test_the_router_passes_calls_and_reasoning_on(routed):
    router, server = routed
    text = f"{THOUGHT}I look.\n{CALL}"
    assert without_ids(answer(router, text)) == without_ids(answer(server, text))


def test_an_agents_loop_through_the_router_goes_on_when_an_engine_is_killed_in_mid_stream(routed, openai):
    router, server = routed
    cities = "Paris " * 400
    thought = f"<think>\n{'Hm. ' * 20}\n</think>\n\n"

    def loop() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
            params = {"model": "moestro-demo", "tools": [WEATHER_TOOL], "max_tokens": 2000}
            messages: list[Any] = [
                {"role": "user", "content": thought + hermes("get_weather", json.dumps({"city": cities}))}
            ]
            with client.chat.completions.stream(messages=messages, **params) as stream:
                reported = stream.get_final_completion().choices[0].message
            [made] = reported.tool_calls
            messages.append(reported.model_dump(exclude_none=True, exclude={"parsed"}))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "21 degrees"})
            final = client.chat.completions.create(messages=messages, **params).choices[0]
        return made.function.arguments, final.message.content

    resumed = total(server, "streams_resumed_total")
    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(loop) for _ in range(4)]
        tokens_come(server, 50)
        kill_an_engine(server)
        for each in loops:
            arguments, final = each.result()
            assert json.loads(arguments) == {"city": cities}
            assert final == "The tool says 21 degrees."
    assert total(server, "streams_resumed_total") > resumed


# --- budgets of reasoning


@pytest.mark.parametrize("budget", [0, 1, 3, 7])
def test_reasoning_ends_at_its_budget_and_the_answer_goes_on(server, budget):
    text = "<think>one two three four five six seven eight nine ten eleven twelve</think>content"
    free = say(server, text).json
    reply = say(server, text, thinking_token_budget=budget, max_tokens=40, return_token_ids=True)
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    reasoning = choice["message"].get("reasoning") or ""
    assert bool(reasoning) == bool(budget)
    assert free["choices"][0]["message"]["reasoning"].startswith(reasoning)
    num_tag = call(server, "POST", "/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json["count"]
    # Until its last token, the tag may still be reasoning.
    num_reasoning = reply.json["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == budget + num_tag - 1
    assert reply.json["usage"]["completion_tokens"] == len(choice["token_ids"])
    spelled = call(server, "POST", "/detokenize", {"tokens": choice["token_ids"]}).json["prompt"]
    assert spelled.startswith(f"<think>{reasoning}</think>")
    assert choice["message"]["content"], "the fake rank goes on with the prompt's next tokens"
    streamed = joined(say(server, text, thinking_token_budget=budget, max_tokens=40, stream=True))
    assert streamed["reasoning"] == reasoning
    assert streamed["content"] == choice["message"]["content"]


def test_a_budget_that_is_not_reached_changes_nothing(server):
    text = f"{THOUGHT}content"
    for budget in (-1, None, 400):
        assert answer(server, text, thinking_token_budget=budget) == answer(server, text)


def test_a_budget_counts_each_choice_and_one_request(server):
    def counts() -> dict[str, float]:
        names = ("vllm:request_success_total", "vllm:prompt_tokens_total")
        return {name: value for name, value in metrics(server).items() if name.startswith(names)}

    text = "<think>one two three four five six</think>content"
    before = counts()
    body = say(server, text, thinking_token_budget=2, n=2, max_tokens=12).json
    first, second = (choice["message"]["reasoning"] for choice in body["choices"])
    assert first == second
    assert text.startswith(f"<think>{first}")
    gained = {name: value - before[name] for name, value in counts().items() if value != before[name]}
    assert sum(value for name, value in gained.items() if "success" in name) == 2
    assert sum(value for name, value in gained.items() if "prompt_tokens" in name) == 2 * body["usage"]["prompt_tokens"]


def test_a_budget_without_an_end_of_reasoning_is_refused(server, fake):
    for where, fields in ((fake, {}), (server, {"logprobs": True}), (server, {"thinking_token_budget": -2})):
        reply = say(where, "x", **{"thinking_token_budget": 3} | fields)
        assert error(reply)[:2] == (400, "thinking_token_budget")
    reply = call(server, "POST", "/v1/completions", {"prompt": "x", "thinking_token_budget": 3})
    assert error(reply)[:2] == (400, "thinking_token_budget")
