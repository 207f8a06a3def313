"""Translates the body of OpenAI's `POST /v1/responses` to that of a chat completion. Nothing is stored."""

from __future__ import annotations

from typing import Any

import msgspec

from moestro.errors import RequestError, shown
from moestro.web.adapters.field_places import FieldPlaces, TranslatedChat

# Places of a chat's body, by which its errors name fields, with those of a response's request.
_PLACES = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}
_LOGPROBS = "message.output_text.logprobs"
# Values of `include` that add nothing which this server could have.
_WITHOUT_EFFECT = ("reasoning.encrypted_content",)


class InputPart(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct):
    """One item of the conversation: a message, a call of a tool, its output, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class FunctionTool(msgspec.Struct):
    """One function of the client."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    strict: bool | None = None


class FunctionChoice(msgspec.Struct):
    """A function that the model has to call."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct):
    """Form of the answer's text."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """Form and length of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    """Effort of reasoning. A summary is never made: the whole text of the reasoning is returned."""

    effort: str | None = None
    summary: str | None = None


class ResponsesFields(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses`. The last four fields are vLLM's and Moestro's, as in chat completions."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    user: str | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    service_class: str | None = None


def chat_of_response(fields: ResponsesFields) -> TranslatedChat:
    """Return the chat completion that answers the request.

    Raises:
        RequestError: An item, a part, a tool or a choice has no counterpart in a chat completion.
    """
    places = FieldPlaces(_PLACES)
    chat: dict[str, Any] = {
        "messages": _messages(fields, places),
        "max_completion_tokens": fields.max_output_tokens,
        "tool_choice": _choice(fields.tool_choice),
    }
    for name in (
        *("model", "temperature", "top_p", "parallel_tool_calls", "user", "top_k"),
        *("cache_salt", "priority", "service_class"),
    ):
        chat[name] = getattr(fields, name)
    if fields.tools:
        chat["tools"] = [_tool(f"tools[{i}]", tool, places) for i, tool in enumerate(fields.tools)]
    if fields.text is not None:
        chat |= {"verbosity": fields.text.verbosity, "response_format": _format(fields.text.format)}
    if fields.reasoning is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    if fields.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    given = {name: value for name, value in (chat | _logprobs(fields)).items() if value is not None}
    return TranslatedChat(given, places)


def _messages(fields: ResponsesFields, places: FieldPlaces) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        places.add("messages[0]", "instructions")
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        places.add(f"messages[{len(messages)}]", "input")
        return [*messages, {"role": "user", "content": fields.input}]
    for i, item in enumerate(fields.input):
        num_before = len(messages)
        in_message = _take_item(f"input[{i}]", item, messages)
        last = f"messages[{len(messages) - 1}]"
        if len(messages) > num_before:
            places.add(last, f"input[{i}]")
        if in_message:
            places.add(f"{last}{in_message}", f"input[{i}]")
    return messages


def _take_item(place: str, item: InputItem, messages: list[dict[str, Any]]) -> str:
    """Add an item to the messages. Returns its place within the last one; empty if it is that message."""
    match item.type:
        case "message":
            content = _text(f"{place}.content", item.content)
            if item.role == "assistant":
                _of_assistant(messages, "content")["content"] = content
            else:
                messages.append({"role": item.role or "user", "content": content})
        case "function_call":
            calls = _of_assistant(messages, "").setdefault("tool_calls", [])
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            calls.append({"id": item.call_id, "type": "function", "function": function})
            return f".tool_calls[{len(calls) - 1}].function"
        case "function_call_output":
            content = _text(f"{place}.output", item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case "reasoning":
            text = "\n".join(part.text or "" for part in _parts(item.content) or _parts(item.summary))
            _of_assistant(messages, "reasoning_content")["reasoning_content"] = text
        case _:
            raise _unsupported(f"{place}.type", f"items of type {shown(item.type)} are not supported")
    return ""


def _of_assistant(messages: list[dict[str, Any]], field: str) -> dict[str, Any]:
    """Return the assistant's message to which the next item belongs: the last one, unless it has `field` or more.

    Reasoning, a message and calls that follow each other in this order are one turn of the assistant.
    """
    last = messages[-1] if messages else {}
    order = ("reasoning_content", "content", "tool_calls")
    later = order[order.index(field) :] if field else ()
    if last.get("role") != "assistant" or any(last.get(name) for name in later):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _parts(content: str | list[InputPart] | None) -> list[InputPart]:
    return [InputPart("text", content)] if isinstance(content, str) else content or []


def _text(place: str, content: str | list[InputPart] | None) -> str:
    if content is None:
        raise RequestError(f"{place} is missing; send a text.", param=place, code="invalid_value")
    texts = []
    for i, part in enumerate(_parts(content)):
        if part.text is None:
            raise _unsupported(f"{place}[{i}]", f"only text is supported, got a part of type {shown(part.type)}")
        texts.append(part.text)
    return "\n".join(texts)


def _tool(place: str, tool: FunctionTool, places: FieldPlaces) -> dict[str, Any]:
    if tool.type != "function":
        raise _unsupported(place, f"only tools of type function are supported, got {shown(tool.type)}")
    places.add(f"{place}.function", place)
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    if bytes(tool.parameters) != b"null":
        function["parameters"] = tool.parameters
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: str | FunctionChoice | None) -> object:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "function":
        raise _unsupported("tool_choice", f"only a function can be chosen, got type {shown(choice.type)}")
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; send a name.", param="tool_choice.name", code="invalid_value")
    return {"type": "function", "function": {"name": choice.name}}


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    schema: dict[str, Any] = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _logprobs(fields: ResponsesFields) -> dict[str, Any]:
    for each in fields.include or ():
        if each not in (_LOGPROBS, *_WITHOUT_EFFECT):
            raise _unsupported("include", f"{shown(each)} is not supported")
    if _LOGPROBS not in (fields.include or ()) and not fields.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}


def _unsupported(param: str, text: str) -> RequestError:
    return RequestError(f"{param}: {text}.", param=param, code="unsupported_parameter")
