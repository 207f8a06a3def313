"""A server takes back every answer that it gave, in all three APIs, whatever the format and wherever it ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.interrupted_answers import running
from support.model_outputs import ANSWERS, BROKEN, hermes
from support.model_outputs import TOOLS as SPECS
from support.parroting_server import FLAGS, TOOLS, joined, say, whole, without_ids
from support.running import Running, call

from moestro.server.api.protocol import Usage
from moestro.server.api.request_runner import MessageEncoding, ResponseEncoding, _decode_message, _decode_response
from moestro.server.api.responses import ChatForm, Heading
from moestro.server.api.validation import parse_chat
from moestro.server.engines.request_state import Piece
from moestro.text.chats.chat_format import ChatEnd, ChatFormat, ToolUse
from moestro.text.parsing.output_parser import REASONING_PARSERS, TOOL_PARSERS, ToolSpec
from moestro.web.adapters.messages import chat_of_message
from moestro.web.adapters.responses_answer import settings_of
from moestro.web.adapters.responses_request import chat_of_response

REASONING = {"mistral": "mistral", "gpt-oss": "gpt-oss", "glm45": "glm45", "deepseek_v3": "deepseek_r1"}
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = hermes("get_weather", '{"city": "Paris"}')
ASK = {"role": "user", "content": "hi"}
REASONS = ("stop", "length")
encode = msgspec.json.encode


def answers(name: str) -> Iterator[str]:
    yield ""
    for text, _ in ANSWERS[name] + BROKEN[name]:
        yield text
        yield THOUGHT + text
    yield "<think>Hm, what"
    yield "[THINK]Hm, what"


def chat_answer(name: str, text: str, reason: str, specs: tuple[ToolSpec, ...] = SPECS) -> Any:
    """The chat completion of a model that writes `text`."""
    form = ChatFormat(calls=TOOL_PARSERS.make(name), reasoning=REASONING_PARSERS.make(REASONING.get(name, "qwen3")))
    parser = form.answers(ToolUse(choice="auto", tools=specs), ChatEnd(prompt="x")).parser()
    parts = parser.feed(text) + parser.finish(is_cut=reason == "length")
    piece = Piece(0, text, parser.finish_reason(reason), parts=tuple(parts))
    return ChatForm(Heading("chatcmpl-1", 1, "m", "f"), None).whole([piece], Usage(1, 1, 2, None))


def sent_back(name: str, answer: Any) -> Iterator[bytes]:
    """Bodies of chats with the answer as history, as each of the APIs makes them."""
    message = msgspec.json.decode(encode(answer))["choices"][0]["message"]
    yield encode({"messages": [ASK, message, ASK]})
    yield encode({"messages": [ASK, {k: v for k, v in message.items() if v is not None and v != []}, ASK]})
    content = msgspec.json.decode(MessageEncoding().whole(answer))["content"]
    fields, unknown = _decode_message(
        encode({"max_tokens": 9, "messages": [ASK, {"role": "assistant", "content": content}, ASK]})
    )
    assert not unknown
    yield encode(chat_of_message(fields).fields)
    params, _ = _decode_response(encode({"input": "hi"}))
    offered = chat_of_response(params).tools
    output = msgspec.json.decode(ResponseEncoding(settings_of(params), offered).whole(answer))["output"]
    fields, unknown = _decode_response(encode({"input": [ASK, *output, ASK]}))
    assert not unknown
    yield encode(chat_of_response(fields).chat.fields)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_cut_anywhere_is_taken_back(name, reason):
    """Cuts each recorded answer at each of its characters, and gives it back in each API."""
    num_tried = 0
    for text in answers(name):
        for end in range(0, len(text) + 1, 1 if len(text) < 120 else 7):
            answer = chat_answer(name, text[:end], reason)
            for body in sent_back(name, answer):
                ask = parse_chat(body)
                assert not ask.options.unknown_fields
                assert any(each["role"] == "assistant" for each in ask.messages) or body.count(b"assistant") == 0
                num_tried += 1
    assert num_tried > 100


@pytest.fixture(scope="module")
def server(fake_command, tmp_path_factory) -> Iterator[Running]:
    command = (*fake_command, *FLAGS, "hermes", "--reasoning-parser", "qwen3")
    with running(command, tmp_path_factory.mktemp("history")) as server:
        yield server


TEXTS = ("Hi.", f"{THOUGHT}Hi.", f"{THOUGHT}I look. {CALL}", f"<think>Like {CALL} or so.</think>Hi")


@pytest.mark.parametrize("limit", [1, 4, 9, 14, 22, 400])
@pytest.mark.parametrize("text", TEXTS)
def test_a_running_server_takes_its_answers_back_in_all_apis(server, text, limit):
    message = say(server, text, tools=TOOLS, max_tokens=limit).json["choices"][0]["message"]
    again = {"messages": [ASK, message, ASK], "max_tokens": 1}
    assert call(server, "POST", "/v1/chat/completions", again).status == 200

    params = {"max_tokens": limit, "messages": [{"role": "user", "content": text}]}
    content = call(server, "POST", "/v1/messages", params).json["content"]
    history = [ASK, {"role": "assistant", "content": content}, ASK]
    assert call(server, "POST", "/v1/messages", {"max_tokens": 1, "messages": history}).status == 200

    output = call(server, "POST", "/v1/responses", {"input": text, "max_output_tokens": limit}).json["output"]
    again = {"input": [ASK, *output, ASK], "max_output_tokens": 1}
    assert call(server, "POST", "/v1/responses", again).status == 200


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "reasoning": "Hm."},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "assistant", "content": "", "annotations": [], "audio": None, "function_call": None},
    ],
)
def test_messages_of_other_servers_without_content_are_taken(server, message):
    reply = call(server, "POST", "/v1/chat/completions", {"messages": [ASK, message, ASK], "max_tokens": 1})
    assert reply.status == 200, reply.body


# --- what an answer's parts are


def answer(server, text: str, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same as a stream."""
    fields = {"tools": TOOLS} | fields
    message = whole(say(server, text, **fields))
    assert without_ids(joined(say(server, text, **fields, stream=True))) == without_ids(message)
    return message


def test_a_stop_string_holds_for_content_and_not_for_reasoning_or_calls(server):
    thought = "<think>\nThe task says Question: what is 2+2? That is 4.\n</think>\n\n"
    message = answer(server, f"{thought}The answer is 4. Question: more?", stop=["Question:"])
    assert message["reasoning"] == "The task says Question: what is 2+2? That is 4."
    assert (message["content"].strip(), message["finish_reason"]) == ("The answer is 4.", "stop")
    message = answer(server, f"{thought}4. Question: more?", stop="Question:", include_stop_str_in_output=True)
    assert message["content"].strip() == "4. Question:"
    message = answer(server, f"{thought}I look.\n{CALL}", stop=["Paris", "</tool_call>", "<"])
    assert (message["content"], message["finish_reason"]) == ("I look.", "tool_calls")
    assert message["tool_calls"][0]["arguments"] == '{"city": "Paris"}'
    message = answer(server, f"A stop. {CALL}", stop="stop")
    assert (message["content"].strip(), message["tool_calls"], message["finish_reason"]) == ("A", [], "stop")
    message = answer(server, f"One stop, {'and ' * 20}stop, three", stop="stop", min_tokens=9)
    assert message["content"].startswith("One stop, and and")
    assert "three" not in message["content"]


def test_a_stop_string_in_reasoning_ends_no_answer_of_the_agents_apis(server):
    text = f"<think>\nQuestion: hm.\n</think>\n\nI look.\n{CALL}"
    tool = TOOLS[0]["function"]
    params = {
        "max_tokens": 400,
        "messages": [{"role": "user", "content": text}],
        "stop_sequences": ["Question:", "Par"],
    }
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
    reply = call(server, "POST", "/v1/messages", params | {"tools": tools}).json
    assert [each["type"] for each in reply["content"]] == ["thinking", "text", "tool_use"]
    assert (reply["stop_reason"], reply["content"][2]["input"]) == ("tool_use", {"city": "Paris"})
    params = {"input": text, "max_output_tokens": 400, "stop": ["Question:", "Par"]}
    reply = call(server, "POST", "/v1/responses", params | {"tools": [{"type": "function", **tool}]}).json
    assert [each["type"] for each in reply["output"]] == ["reasoning", "message", "function_call"]
    assert reply["output"][2]["arguments"] == '{"city": "Paris"}'


def test_a_marker_quoted_in_reasoning_is_reasoning(server):
    message = answer(server, f"<think>\nIn C++ I name it <tool_call> or {CALL} but no.\n</think>\n\nDone.")
    assert (message["content"], message["tool_calls"], message["finish_reason"]) == ("Done.", [], "stop")
    assert message["reasoning"].endswith("but no.")


def test_a_call_of_no_tool_of_the_request_is_content(server):
    text = hermes("launch", "{}")
    message = answer(server, text)
    assert (message["content"], message["tool_calls"], message["finish_reason"]) == (text, [], "stop")


def test_an_answer_that_is_cut_anywhere_shows_no_piece_of_a_tag(server):
    text = f"{THOUGHT}I look.\n{CALL}"
    for limit in range(1, 60):
        message = answer(server, text, max_tokens=limit)
        assert "I look.".startswith(message["content"].strip())
        assert "Hm.".startswith(message["reasoning"].strip())
        assert all('{"city": "Paris"}'.startswith(each["arguments"]) for each in message["tool_calls"])
        if message["finish_reason"] != "length":
            break
    assert message["finish_reason"] == "tool_calls"


# --- keys that clients read


def test_keys_that_clients_read_are_always_present(server):
    reply = say(server, "Hi", max_tokens=2).json
    assert {"service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"} <= set(
        reply
    )
    [choice] = reply["choices"]
    assert {"logprobs", "stop_reason", "token_ids"} <= set(choice)
    empty = {"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"}
    assert {name: choice["message"].get(name, 0) for name in empty} == dict.fromkeys(empty)
    assert choice["message"]["tool_calls"] == []
    for event in say(server, "Hi", max_tokens=2, stream=True).events[:-1]:
        assert event["choices"][0]["delta"]["reasoning"] is None
        assert "usage" not in event


def test_an_unmodified_client_reads_the_reasoning_of_any_answer(server, openai):
    params = {"model": "moestro-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = client.chat.completions.create(**params)
        assert (made.choices[0].message.reasoning, made.prompt_logprobs, made.prompt_token_ids) == (None, None, None)
        for chunk in client.chat.completions.create(**params, stream=True):
            assert chunk.choices[0].delta.reasoning is None


def test_the_list_of_models_shows_no_path_of_the_machine(server):
    for card in call(server, "GET", "/v1/models").json["data"]:
        assert card["root"] == card["id"]


def test_a_stop_of_white_space_ends_the_answer_with_its_own_token(server):
    text = "First line.\n\nSecond line."
    count = call(server, "POST", "/tokenize", {"prompt": "First line.\n\n", "add_special_tokens": False}).json["count"]
    for stream in (False, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = say(server, text, tools=TOOLS, stop=["\n\n"], **options)
        assert (joined if stream else whole)(reply)["content"] == "First line."
        usage = reply.events[-2]["usage"] if stream else reply.json["usage"]
        assert usage["completion_tokens"] == count


def test_a_stop_that_ends_in_the_first_tokens_does_not_end_the_answer_later(server):
    """The parser holds `<tool` back until the token behind `min_tokens`."""
    text = "a <toolbox> b"
    held = call(server, "POST", "/tokenize", {"prompt": "a <tool", "add_special_tokens": False}).json["count"]
    message = whole(say(server, text, tools=TOOLS, stop=["<to"], min_tokens=held))
    assert message["content"] == text
    assert whole(say(server, text, tools=TOOLS, stop=["<to"]))["content"] == "a "
