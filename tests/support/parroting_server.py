"""A server whose fake ranks answer with the text of the last message, through a chat template that tests choose."""

from __future__ import annotations

from typing import Any

from support.running import Reply, Running, call

# A model that repeats its prompt says what the last message says; after the result of a tool, it reports that. Earlier
# messages follow the end token, so that each leaves a trace in the prompt.
PARROT = """{%- if messages[-1].role == 'tool' -%}
The tool says {{ messages[-1].content }}.
{%- else -%}
{{ messages[-1].content }}
{%- endif -%}<|im_end|>{%- for m in messages[:-1] -%}.{%- endfor -%}{{- '<think>' if enable_thinking -}}"""
FLAGS = ("--chat-template", PARROT, "--tool-call-parser")

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PING_TOOL = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER_TOOL, PING_TOOL]


def say(server: Running, text: str, **fields: Any) -> Reply:
    """Let the model answer with `text`."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 500} | fields
    return call(server, "POST", "/v1/chat/completions", body)


def joined(reply: Reply) -> dict[str, Any]:
    """The message that a stream adds up to, as a client joins it; and its last `finish_reason`."""
    assert reply.status == 200, reply.body
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for event in reply.events[:-1]:
        assert "error" not in event
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for addition in delta.get("tool_calls", ()):
                _add(message["tool_calls"], addition)
    return message | {"finish_reason": reason}


def _add(calls: list[dict[str, Any]], addition: dict[str, Any]) -> None:
    if addition["index"] == len(calls):
        assert addition["id"]
        assert addition["type"] == "function"
        calls.append({"id": addition["id"], "name": addition["function"]["name"], "arguments": ""})
    else:
        assert addition["index"] == len(calls) - 1
        assert addition.keys() == {"index", "function"}
        assert addition["function"].keys() == {"arguments"}
    calls[-1]["arguments"] += addition["function"]["arguments"]


def whole(reply: Reply) -> dict[str, Any]:
    """The message of an answer that is no stream, in the same form."""
    assert reply.status == 200, reply.body
    [choice] = reply.json["choices"]
    message = choice["message"]
    calls = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
    texts = {name: message.get(name) or "" for name in ("content", "reasoning", "reasoning_content")}
    return texts | {"tool_calls": calls, "finish_reason": choice["finish_reason"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"tool_calls": [{k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]]}
