"""Translates chat completions, whole and in chunks, to Anthropic's messages and events.

A chat completion comes as its JSON in builtin types, so that fields which this version lacks are simply absent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from moestro.core.json_elements import is_too_deep

Event = dict[str, Any]  # Data of an event; its `type` is also the event's name.

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def message_of_chat(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the message of a chat completion with one choice."""
    choice = answer["choices"][0]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        content.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        content.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        )
    return _message(answer, content, _ending(choice), _usage(answer.get("usage")))


def _message(
    answer: dict[str, Any], content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]
) -> dict[str, Any]:
    head = {"id": answer["id"], "type": "message", "role": "assistant", "model": answer["model"], "content": content}
    return head | ending | {"usage": usage}


def _input(arguments: str) -> Any:
    """Return the arguments of a call. Text that is no JSON object, as in a cut answer, keeps the form for such text."""
    if not is_too_deep(arguments.encode()):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    return {"INVALID_JSON": arguments}


def _ending(choice: dict[str, Any]) -> dict[str, Any]:
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any] | None) -> dict[str, int]:
    """Return the token counts. Anthropic's input tokens are those of the prompt that no cache had."""
    usage = usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, usage.get("prompt_tokens", 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


class MessageStream:
    """Translates the chunks of one stream, in order.

    A content block ends where text of another kind, or another call of a tool, begins.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._index = -1
        self._kind = ""  # Type of the open block; empty without one.
        self._call: object = None  # Index of the open call.
        self._choice: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk."""
        self._usage = chunk.get("usage") or self._usage
        if not self._has_begun:
            self._has_begun = True
            open_end = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": _message(chunk, [], open_end, _usage(self._usage))}
            yield {"type": "ping"}
        for choice in chunk["choices"]:
            yield from self._take_delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._choice = choice

    def end(self) -> Iterator[Event]:
        """Yield the events that end a complete message."""
        yield from self._close()
        yield {"type": "message_delta", "delta": _ending(self._choice), "usage": _usage(self._usage)}
        yield {"type": "message_stop"}

    def _take_delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        if thought := delta.get("reasoning_content"):
            yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._open({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            yield from self._take_call(call)

    def _take_call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call.get("function") or {}
        if self._kind != "tool_use" or call.get("index") != self._call:
            yield from self._close()
            self._call = call.get("index")
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": call.get("id"),
                "name": function.get("name"),
                "input": {},
            }
            yield from self._open(block)
        if arguments := function.get("arguments"):
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Open a block, unless one of its type is open."""
        if self._kind == block["type"]:
            return
        yield from self._close()
        self._index += 1
        self._kind = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._kind:
            self._kind = ""
            yield {"type": "content_block_stop", "index": self._index}
