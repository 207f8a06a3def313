"""Anthropic's messages and OpenAI's responses as translations of chats, there and back."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from moestro.errors import RequestError
from moestro.web.adapters.field_places import FieldPlaces
from moestro.web.adapters.messages import (
    ConversationTurn,
    MessagesFields,
    MessageStream,
    chat_of_message,
    message_of_chat,
)
from moestro.web.adapters.paths import chat_body
from moestro.web.adapters.responses_answer import ResponseStream, response_of_chat, settings_of
from moestro.web.adapters.responses_request import OfferedTools, ResponsesFields, chat_of_response

USAGE = {
    "prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27, "prompt_tokens_details": {"cached_tokens": 16},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def of_message(**fields):
    return json.loads(chat_body("/v1/messages", json.dumps({"max_tokens": 9, "model": "m"} | fields).encode()))


def of_response(**fields):
    return json.loads(chat_body("/v1/responses", json.dumps({"model": "m"} | fields).encode()))


def user(content):
    return {"role": "user", "content": content}


# --- requests of /v1/messages


def test_a_message_is_a_chat_with_its_system_prompt_first():
    system = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    chat = of_message(
        system=system, messages=[user("hi")], stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=3,
        metadata={"user_id": "ann"}, cache_salt="s", stream=True,
    )  # fmt: skip
    assert chat == {
        "model": "m",
        "messages": [{"role": "system", "content": "a\nb"}, user("hi")],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "user": "ann",
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_tools_their_use_and_their_results_are_those_of_chats():
    chat = of_message(
        tools=[{"name": "weather", "description": "d", "input_schema": SCHEMA}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        messages=[
            user("where?"),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                ],
            },
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "tool_result", "tool_use_id": "t2"},
                    {"type": "text", "text": "and now?"},
                ]
            ),
        ],
    )
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert chat["parallel_tool_calls"] is False
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    assert chat["messages"] == [
        user("where?"),
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        user("and now?"),
    ]


@pytest.mark.parametrize(("kind", "choice"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices_have_other_names(kind, choice):
    assert of_message(messages=[user("x")], tool_choice={"type": kind})["tool_choice"] == choice


def test_thinking_and_output_are_the_templates_and_the_grammars_matter():
    on = of_message(messages=[user("x")], thinking={"type": "enabled", "budget_tokens": 2048})
    assert on["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    off = of_message(messages=[user("x")], thinking={"type": "disabled"})
    assert off["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert "chat_template_kwargs" not in of_message(messages=[user("x")], thinking={"type": "adaptive"})
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"}
    chat = of_message(messages=[user("x")], output_config=wanted)
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert chat["reasoning_effort"] == "max"


def test_what_agents_always_send_changes_nothing():
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": SCHEMA}]
    chat = of_message(messages=[user("x")], context_management=edits, tools=tools, tool_choice={"type": "auto"})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f"]
    assert chat.keys() == {"model", "messages", "max_completion_tokens", "tools", "tool_choice"}


def test_a_last_message_of_the_assistant_is_continued():
    chat = of_message(messages=[user("x"), {"role": "assistant", "content": "The answer is ("}])
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "messages": [
                    user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}])
                ]
            },
            "messages[0].content[0]",
        ),
        ({"messages": [user("x"), {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [user("x")], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        (
            {"messages": [user("x")], "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0]",
        ),
        ({"messages": [user("x")], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"messages": [user("x")], "thinking": {"type": "deep"}}, "thinking.type"),
        ({"messages": [user("x")], "output_format": {"type": "xml"}}, "output_format.type"),
        ({"messages": [user("x")], "system": [{"type": "image"}]}, "system[0]"),
    ],
)
def test_what_a_chat_lacks_is_refused_by_its_place_in_a_message(fields, param):
    with pytest.raises(RequestError) as caught:
        of_message(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_page_that_anthropics_servers_fetched_is_text_of_the_history():
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The sky is blue."}}
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_fetch", "input": {"url": "u"}},
        {"type": "web_fetch_tool_result", "content": {"type": "web_fetch_result", "url": "u", "content": document}},
    ]
    [made] = of_message(messages=[{"role": "assistant", "content": blocks}])["messages"]
    assert made["content"] == '[used web_fetch: {"url": "u"}]\n[found: u\nThe sky is blue.]'


# --- requests of /v1/responses

NOTE = {"type": "function", "name": "note", "parameters": SCHEMA}
FREE = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
GROUP = {"type": "namespace", "name": "mcp__files__", "tools": [NOTE, FREE]}
SEARCH = {"type": "web_search", "external_web_access": False}


def translated(**fields):
    return chat_of_response(msgspec.json.decode(json.dumps({"input": "x"} | fields), type=ResponsesFields))


def test_tools_of_a_namespace_and_custom_tools_are_functions_of_the_chat():
    made = translated(tools=[SEARCH, NOTE, GROUP])
    functions = [tool["function"] for tool in json.loads(msgspec.json.encode(made.chat.fields))["tools"]]
    assert [each["name"] for each in functions] == ["note", "mcp__files__note", "mcp__files__patch"]
    assert functions[0]["parameters"] == functions[1]["parameters"] == SCHEMA
    assert functions[2]["parameters"]["required"] == ["input"]
    assert "start: /a/" in functions[2]["description"]
    assert made.chat.left_out == ("tools[0] (web_search)", "tools[2].tools[1].format")
    assert made.chat.places.own_place("tools[1].function.parameters") == "tools[2].tools[0].parameters"


@pytest.mark.parametrize("kind", ["web_search_preview_2025_03_11", "web_search_2025_08_26", "tool_search"])
def test_a_tool_of_openais_servers_is_left_out_whatever_its_date(kind):
    made = translated(tools=[NOTE, {"type": kind}])
    assert (len(made.chat.fields["tools"]), made.chat.left_out) == (1, (f"tools[1] ({kind})",))


def test_a_custom_tool_of_any_text_has_no_grammar_that_is_left_out():
    assert translated(tools=[{"type": "custom", "name": "patch", "format": {"type": "text"}}]).chat.left_out == ()


def test_calls_come_back_as_calls_of_the_clients_tools():
    made = translated(tools=[GROUP])
    calls = [
        {"id": "c0", "type": "function", "function": {"name": "mcp__files__note", "arguments": "{}"}},
        {"id": "c1", "type": "function", "function": {"name": "mcp__files__patch", "arguments": '{"input": "a\\nb"}'}},
        {"id": "c2", "type": "function", "function": {"name": "mcp__files__patch", "arguments": "no JSON"}},
    ]
    answer = whole({"content": None, "tool_calls": calls}, "tool_calls")
    found = response_of_chat(answer, settings_of(ResponsesFields(input="x")), made.tools)["output"]
    names = [(each["type"], each["namespace"], each["name"], each["call_id"]) for each in found]
    assert names == [
        ("function_call", "mcp__files__", "note", "c0"),
        ("custom_tool_call", "mcp__files__", "patch", "c1"),
        ("custom_tool_call", "mcp__files__", "patch", "c2"),
    ]
    assert [each.get("input") for each in found] == [None, "a\nb", "no JSON"]


def test_a_history_of_every_kind_of_call_is_read():
    items = [
        {"type": "function_call", "call_id": "a", "namespace": "mcp__files__", "name": "note", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
        {"type": "local_shell_call_output", "call_id": "c", "output": "file"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "moe"}},
    ]
    reported, patched, listed, searched = translated(input=items).chat.fields["messages"]
    functions = [call["function"] for call in reported["tool_calls"]]
    assert [each["name"] for each in functions] == ["mcp__files__note", "patch", "local_shell"]
    assert [json.loads(each["arguments"]) for each in functions[1:]] == [
        {"input": "x"},
        {"type": "exec", "command": ["ls"]},
    ]
    assert (patched["content"], listed["content"]) == ("done", "file")
    assert "moe" in searched["content"]


def test_allowed_tools_limit_what_is_offered():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "note"}]}
    chat = translated(tools=[NOTE, FREE], tool_choice=choice).chat.fields
    assert chat["tool_choice"] == "required"
    assert [each["function"]["name"] for each in chat["tools"]] == ["note"]


def test_fields_that_clients_always_send_are_taken():
    chat = translated(
        store=True, truncation="auto", prompt_cache_key="thread-1", seed=3, stop="x", text={"verbosity": "low"}
    ).chat.fields
    assert (chat["truncate_prompt_tokens"], chat["prompt_cache_key"], chat["seed"], chat["stop"]) == (
        -1,
        "thread-1",
        3,
        "x",
    )
    assert chat["verbosity"] == "low"
    assert "store" not in chat


def test_a_response_is_a_chat_with_its_instructions_first():
    chat = of_response(
        input="hi", instructions="be brief", max_output_tokens=9, temperature=0.1, top_p=0.5, stream=True, user="ann",
        parallel_tool_calls=False, reasoning={"effort": "low"}, include=["message.output_text.logprobs"],
        top_logprobs=2, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
        tools=[{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True, "description": None}],
        tool_choice={"type": "function", "name": "f"},
    )  # fmt: skip
    assert chat == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, user("hi")],
        "max_completion_tokens": 9,
        "temperature": 0.1,
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "ann",
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }


def test_items_that_follow_each_other_are_one_turn_of_the_assistant():
    text = {"type": "output_text", "text": "I look.", "annotations": []}
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(2)]
    chat = of_response(
        input=[
            {"role": "developer", "content": "d"},
            user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [text]},
            *calls,
            {"type": "function_call_output", "call_id": "c0", "output": "sun"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "Both."},
            {"role": "assistant", "content": "Really."},
        ]
    )
    reported = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(2)]
    assert chat["messages"] == [
        {"role": "developer", "content": "d"},
        user("a\nb"),
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": reported},
        {"role": "tool", "tool_call_id": "c0", "content": "sun"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "Both."},
        {"role": "assistant", "content": "Really."},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [user([{"type": "input_image", "image_url": "x"}])]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"input": "x", "tools": [NOTE, NOTE]}, "tools[1].name"),
        (
            {"input": "x", "tools": [NOTE], "tool_choice": {"type": "allowed_tools", "tools": [FREE]}},
            "tool_choice.tools",
        ),
        (
            {"input": "x", "tools": [NOTE], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools",
        ),
        ({"input": "x", "tools": [NOTE], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"input": "x", "tools": [NOTE], "tool_choice": {"type": "allowed_tools", "mode": "none"}}, "tool_choice.mode"),
        ({"input": "x", "tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"input": "x", "truncation": "middle"}, "truncation"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include"),
    ],
)
def test_what_a_chat_lacks_is_refused_by_its_place_in_a_response(fields, param):
    with pytest.raises(RequestError) as caught:
        of_response(**fields)
    assert caught.value.param == param


# --- places of fields


def test_errors_name_the_innermost_place_that_is_known():
    places = FieldPlaces({"stop": "stop_sequences"})
    places.add("messages[1]", "messages[0]")
    places.add("messages[1].tool_calls[0].function", "messages[0].content[2]")
    for place, own in (
        ("stop", "stop_sequences"),
        ("stop_token_ids", "stop_token_ids"),
        ("messages[1].role", "messages[0].role"),
        ("messages[1].tool_calls[0].function.name", "messages[0].content[2].name"),
        ("messages[10].role", "messages[10].role"),
        ("model", "model"),
    ):
        assert places.own_place(place) == own


def test_an_error_has_the_clients_name_in_its_text_too():
    places = FieldPlaces({"stop": "stop_sequences"})
    with pytest.raises(RequestError, match="stop_sequences may hold 4") as caught, places.naming_errors():
        raise RequestError("stop may hold 4", param="stop")
    assert caught.value.param == "stop_sequences"
    with pytest.raises(RequestError, match="The queue is full") as caught, places.naming_errors():
        raise RequestError("The queue is full")
    assert caught.value.param is None


# --- answers


def whole(message: dict[str, object], reason: str, stop: object = None):
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": reason, "stop_reason": stop}
    return {"id": "resp_1", "model": "m", "created": 5, "choices": [choice], "usage": USAGE}


def test_a_message_has_a_block_for_each_part_of_the_chat():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = message_of_chat(whole({"content": "hi", "reasoning_content": "hm", "tool_calls": [call]}, "tool_calls"))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16, "output_tokens": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 17, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_an_ending_has_anthropics_name(reason, stop, expected):
    message = message_of_chat(whole({"content": "x"}, reason, stop))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_arguments_that_were_cut_off_keep_their_text():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    [block] = message_of_chat(whole({"content": None, "tool_calls": [call]}, "length"))["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": '}


def test_a_response_repeats_its_settings_and_says_why_it_ended():
    fields = msgspec.json.decode(
        json.dumps({"input": "x", "metadata": {"a": "b"}, "tools": [{"type": "function", "name": "f"}]}).encode(),
        type=ResponsesFields,
    )
    tools = chat_of_response(fields).tools
    response = response_of_chat(whole({"content": "hi"}, "length"), settings_of(fields), tools)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (response["store"], response["previous_response_id"], response["metadata"]) == (False, None, {"a": "b"})
    assert json.loads(msgspec.json.encode(response["tools"])) == [
        {"type": "function", "name": "f", "parameters": None, "strict": None}
    ]
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 16}
    assert list(response)[-1] == "usage"


# --- streams


def random_stream(rng: random.Random):
    """Return (message, chunks) of one answer: reasoning, text and calls, cut at random places."""
    message: dict[str, object] = {"content": None}
    deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]

    def cut(text: str) -> list[str]:
        borders = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(3)))
        return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]

    if rng.random() < 0.5:
        message["reasoning_content"] = "I think, é."
        deltas += [{"reasoning_content": part} for part in cut("I think, é.")]
    if rng.random() < 0.7:
        message["content"] = "Some text 😀"
        deltas += [{"content": part} for part in cut("Some text 😀")]
    calls = []
    for i in range(rng.randrange(3)):
        function = {"name": f"f{i}", "arguments": rng.choice(["{}", '{"a": [1, 2]}', ""])}
        calls.append({"id": f"c{i}", "type": "function", "function": function})
        deltas.append({"tool_calls": [{"index": i, "id": f"c{i}", "function": function | {"arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": i, "function": {"arguments": part}}]} for part in cut(function["arguments"])
        ]
    if calls:
        message["tool_calls"] = calls
    reason = rng.choice(["stop", "length", "tool_calls"])
    answer = whole(message, reason)
    chunks = [
        {k: answer[k] for k in ("id", "model", "created")}
        | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
        for delta in deltas
    ]
    chunks[0]["usage"] = USAGE | {"completion_tokens": 0}
    chunks[-1]["choices"][0]["finish_reason"] = reason
    chunks.append({k: answer[k] for k in ("id", "model", "created")} | {"choices": [], "usage": USAGE})
    return answer, chunks


def test_law_the_events_of_a_message_add_up_to_the_message():
    rng = random.Random(3)
    for _ in range(300):
        answer, chunks = random_stream(rng)
        stream = MessageStream()
        events = [event for chunk in chunks for event in stream.take(chunk)] + list(stream.end())
        assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
        message = events[0]["message"]
        assert message["usage"]["input_tokens"] == 4
        for event in events[2:]:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(message["content"])
                    message["content"].append(dict(event["content_block"]))
                    raw = ""
                case "content_block_delta":
                    assert event["index"] == len(message["content"]) - 1
                    block, delta = message["content"][-1], event["delta"]
                    if delta["type"] == "input_json_delta":
                        raw += delta["partial_json"]
                    else:
                        name = delta["type"].removesuffix("_delta")
                        block[name] += delta[name]
                case "content_block_stop":
                    assert event["index"] == len(message["content"]) - 1
                    if message["content"][-1]["type"] == "tool_use":
                        message["content"][-1]["input"] = json.loads(raw or "{}")
                case "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
        assert events[-1]["type"] == "message_stop"
        assert message == message_of_chat(answer)


def test_law_the_events_of_a_response_add_up_to_the_response():
    rng = random.Random(4)
    settings = settings_of(ResponsesFields(input="x"))
    tools = translated(tools=[{"type": "custom", "name": "f1"}]).tools
    for _ in range(300):
        answer, chunks = random_stream(rng)
        stream = ResponseStream(settings, tools)
        events = [event for chunk in chunks for event in stream.take(chunk)] + list(stream.end())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        expected = response_of_chat(answer, settings, tools)
        final = events[-1]["response"]
        assert events[-1]["type"] == f"response.{expected['status']}"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert final["output"] == done
        assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == list(
            range(len(done))
        )
        texts = ["" for _ in done]
        for event in events:
            if event["type"].endswith(".delta"):
                texts[event["output_index"]] += event["delta"]
                assert event["item_id"] == done[event["output_index"]]["id"]
        assert texts == [
            each.get("arguments", each.get("input")) if "call_id" in each else each["content"][0]["text"]
            for each in done
        ]
        assert final == expected


def test_both_apis_answer_what_a_chat_answers_for_the_same_fields():
    """The structs read all of their own fields: a typed body and its JSON are the same chat."""
    fields = MessagesFields(messages=[ConversationTurn("user", "x")], max_tokens=3)
    assert chat_of_message(fields).fields["max_completion_tokens"] == 3
    assert chat_of_response(ResponsesFields(input="x")).chat.fields["messages"] == [user("x")]


@pytest.mark.parametrize(
    ("pieces", "thought", "text", "wanted"),
    [
        (["<think>", "Hi", " x", "</think>", "Hi", " there", "<tool_call>", "Hi there"], "Hi x", "Hi there", [4, 5]),
        (["Hi", " there"], None, "Hi there", [0, 1]),
        (["a", "\n\nHi ", "there\n"], None, "Hi there", [1, 2]),
        (["<unk>Hi", "there"], None, "Hi there", [0, 1]),
    ],
)
def test_log_probabilities_of_a_response_are_those_of_its_text_alone(pieces, thought, text, wanted):
    entries = [{"token": piece, "logprob": -1.0, "bytes": list(piece.encode()), "top_logprobs": []} for piece in pieces]
    message = {"role": "assistant", "content": text, "reasoning_content": thought}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": entries}}
    answer = {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice]}
    *_, item = response_of_chat(answer, {}, OfferedTools(FieldPlaces({})))["output"]
    assert item["content"][0]["logprobs"] == [entries[number] for number in wanted]
