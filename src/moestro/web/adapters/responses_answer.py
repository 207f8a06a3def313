"""Translates chat completions, whole and in chunks, to OpenAI's responses and their events.

A chat completion comes as its JSON in builtin types, so that fields which this version lacks are simply absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec

from moestro.web.adapters.responses_request import CalledTool, OfferedTools, ResponsesFields, text_of_arguments

Event = dict[str, Any]  # Data of an event; its `type` is also the event's name.
Item = dict[str, Any]  # One item of a response's output.

# Values stay JSON text, because a client's schema may hold numbers that no type of Python's reader takes.
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# Status of a response, and of the item that a limit cut off.
_CALL_KINDS = ("fc", "ctc")
_COMPLETE, _CUT, _UNDER_WAY = "completed", "incomplete", "in_progress"


def settings_of(fields: ResponsesFields) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    text, reasoning = fields.text, fields.reasoning
    wanted = {"type": "text"} if text is None or text.format is None else _plain(text.format)
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "store": False,
        "temperature": fields.temperature,
        "text": {"format": wanted},
        "tool_choice": "auto" if fields.tool_choice is None else msgspec.to_builtins(fields.tool_choice),
        "tools": [{"parameters": None, "strict": None} | _decode_names(tool) for tool in fields.tools or ()],
        "top_p": fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
        "metadata": fields.metadata or {},
    }


def _plain(value: object) -> Any:
    """Return the fields of a struct as JSON text by name, without its empty fields."""
    return {name: raw for name, raw in _decode_names(msgspec.json.encode(value)).items() if bytes(raw) != b"null"}


def response_of_chat(answer: dict[str, Any], settings: dict[str, Any], tools: OfferedTools) -> dict[str, Any]:
    """Return the response of a chat completion with one choice.

    Args:
        settings: Result of `settings_of`.
        tools: Tools that the request offered.
    """
    choice = answer["choices"][0]
    message = choice["message"]
    status = _status(choice)
    output: list[Item] = []
    if thought := message.get("reasoning_content"):
        output.append(_reasoning_item(_item_id(answer, "rs", 0), thought, _COMPLETE))
    text, calls = message.get("content"), message.get("tool_calls") or ()
    if text or not (calls or output):
        logprobs = _logprobs_of(text or "", thought or "", (choice.get("logprobs") or {}).get("content") or [])
        output.append(_message_item(_item_id(answer, "msg", len(output)), text or "", logprobs, _COMPLETE))
    for call in calls:
        function = call["function"]
        tool = tools.called(function["name"])
        item_id = _item_id(answer, _call_kind(tool), len(output))
        arguments = function["arguments"]
        output.append(_call_item(item_id, call["id"], tool, arguments) | {"status": _status_of_call(arguments)})
    if not calls:
        output[-1]["status"] = status  # A limit cuts only the last item.
    return _response(answer, settings, status, output, answer.get("usage"))


def _logprobs_of(text: str, thought: str, entries: list[Any]) -> list[Any]:
    """Return the entries of the tokens of `text`, as a stream has them: without those of reasoning and of calls.

    Args:
        thought: Reasoning before the text.
        entries: Entries of all tokens of the answer. If their bytes do not spell the text, all of them are returned.
    """
    pieces = [bytes(entry["bytes"] or ()) for entry in entries]
    whole, first = b"".join(pieces), thought.encode()
    begin = whole.find(text.encode(), max(0, whole.find(first)) + len(first))
    if begin < 0:
        return entries
    ends = list(accumulate(map(len, pieces)))
    last = begin + len(text.encode())
    return [
        entry
        for entry, piece, end in zip(entries, pieces, ends, strict=True)
        if end > begin and end - len(piece) < last
    ]


def _status(choice: dict[str, Any]) -> str:
    return _CUT if choice.get("finish_reason") == "length" else _COMPLETE


def _status_of_call(arguments: str) -> str:
    """Return the status of a call: it is complete with its arguments, even if a limit cuts what follows.

    A call in which the model or a limit ended the answer has no arguments that a client could use.
    """
    try:
        _decode_names(arguments)
    except (msgspec.DecodeError, RecursionError):
        return _CUT
    return _COMPLETE


def _response(
    answer: dict[str, Any], settings: dict[str, Any], status: str, output: list[Item], usage: dict[str, Any] | None
) -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if status == _CUT else None
    head = {"id": answer["id"], "object": "response", "created_at": answer["created"], "model": answer["model"]}
    state = {"status": status, "error": None, "incomplete_details": details, "output": output}
    return head | state | settings | {"usage": _usage(usage)}  # Last: routers look for it at the end.


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }


def _item_id(answer: dict[str, Any], kind: str, index: int) -> str:
    return f"{kind}_{answer['id'].partition('_')[2]}_{index}"


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(item_id: str, text: str, logprobs: list[Any], status: str) -> Item:
    content = [_text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _reasoning_item(item_id: str, text: str, status: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}


def _call_kind(tool: CalledTool) -> str:
    """Return the kind of a call's item, with which its id begins."""
    return "ctc" if tool.is_custom else "fc"


def _call_item(item_id: str, call_id: str | None, tool: CalledTool, arguments: str) -> Item:
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    known = {"call_id": call_id, "name": tool.name} | namespace
    if tool.is_custom:
        text = text_of_arguments(arguments) if arguments else ""
        return {"id": item_id, "type": "custom_tool_call"} | known | {"input": text}
    return {"id": item_id, "type": "function_call"} | known | {"arguments": arguments}


class ResponseStream:
    """Translates the chunks of one stream, in order.

    An item ends where one of another kind, or another call of a function, begins. Every event has the next number.

    Args:
        settings: Result of `settings_of`.
        tools: Tools that the request offered.
    """

    def __init__(self, settings: dict[str, Any], tools: OfferedTools) -> None:
        self._settings = settings
        self._tools = tools
        self._tool = CalledTool("")  # Tool of the open call.
        self._num_events = 0
        self._head: dict[str, Any] = {}
        self._output: list[Item] = []
        self._kind = ""  # Kind of the open item: "msg", "rs", "fc" or "ctc"; empty without one.
        self._item: dict[str, Any] = {}  # The open item as it was added.
        self._texts: list[str] = []  # Its text so far.
        self._logprobs: list[Any] = []
        self._call: object = None  # Index of the open call.
        self._choice: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk."""
        self._usage = chunk.get("usage") or self._usage
        if not self._head:
            self._head = chunk
            begun = _response(chunk, self._settings, _UNDER_WAY, [], None)
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
        for choice in chunk["choices"]:
            yield from self._take_choice(choice)

    def end(self) -> Iterator[Event]:
        """Yield the events that end a complete response."""
        status = _status(self._choice)
        if not self._kind and not self._output:
            yield from self._open("msg")  # An answer without text is a message without text.
        yield from self._close(status)
        whole = _response(self._head, self._settings, status, self._output, self._usage)
        yield self._event(f"response.{status}", response=whole)

    def failure(self, code: str | None, message: str, param: str | None) -> Event:
        """Return the event that ends a stream with an error."""
        return self._event("error", code=code, message=message, param=param)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1} | fields

    def _take_choice(self, choice: dict[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content"):
            yield from self._open("rs")
            yield self._text_event("response.reasoning_text.delta", delta=thought)
            self._texts.append(thought)
        if text := delta.get("content"):
            yield from self._open("msg")
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            yield self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)
            self._texts.append(text)
            self._logprobs += logprobs
        for call in delta.get("tool_calls") or ():
            yield from self._take_call(call)
        if choice.get("finish_reason") is not None:
            self._choice = choice

    def _take_call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call.get("function") or {}
        if self._kind not in _CALL_KINDS or call.get("index") != self._call:
            yield from self._close(_COMPLETE)
            self._call, self._tool = call.get("index"), self._tools.called(function.get("name") or "")
            yield from self._open(_call_kind(self._tool), call.get("id"))
        if arguments := function.get("arguments"):
            if not self._tool.is_custom:  # The input of a custom tool is known with the last of its arguments.
                yield self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)
            self._texts.append(arguments)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _text_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, **self._place(), content_index=0, **fields)

    def _open(self, kind: str, call_id: str | None = None) -> Iterator[Event]:
        """Open an item, unless one of its kind is open."""
        if self._kind == kind:
            return
        yield from self._close(_COMPLETE)
        self._kind, self._texts, self._logprobs = kind, [], []
        item_id = _item_id(self._head, kind, len(self._output))
        if kind in _CALL_KINDS:
            self._item = _call_item(item_id, call_id, self._tool, "") | {"status": _UNDER_WAY}
        else:
            made = _message_item(item_id, "", [], _UNDER_WAY) if kind == "msg" else _reasoning_item(item_id, "", "")
            self._item = made | {"status": _UNDER_WAY, "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        if kind not in _CALL_KINDS:
            yield self._text_event("response.content_part.added", part=self._part(""))

    def _end_of_call(self, done: Item) -> Iterator[Event]:
        if self._tool.is_custom:
            yield self._event("response.custom_tool_call_input.delta", **self._place(), delta=done["input"])
            yield self._event("response.custom_tool_call_input.done", **self._place(), input=done["input"])
        else:
            known = {"arguments": done["arguments"], "name": done["name"]}
            yield self._event("response.function_call_arguments.done", **self._place(), **known)

    def _part(self, text: str) -> dict[str, Any]:
        return _text_part(text, self._logprobs) if self._kind == "msg" else {"type": "reasoning_text", "text": text}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._kind:
            return
        text = "".join(self._texts)
        if self._kind in _CALL_KINDS:
            done = _call_item(self._item["id"], self._item["call_id"], self._tool, text)
            done["status"] = _status_of_call(text)
            yield from self._end_of_call(done)
        else:
            is_message = self._kind == "msg"
            logprobs = {"logprobs": self._logprobs} if is_message else {}
            kind = "response.output_text.done" if is_message else "response.reasoning_text.done"
            yield self._text_event(kind, text=text, **logprobs)
            yield self._text_event("response.content_part.done", part=self._part(text))
            done = self._item | {"content": [self._part(text)], "status": status}
        yield self._event("response.output_item.done", output_index=len(self._output), item=done)
        self._output.append(done)
        self._kind = ""
