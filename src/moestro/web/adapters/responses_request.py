"""Translates the body of OpenAI's `POST /v1/responses` to that of a chat completion. Nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from moestro.errors import RequestError, shown
from moestro.web.adapters.field_places import FieldPlaces, TranslatedChat
from moestro.web.adapters.responses_tools import (
    ChoiceField,
    FunctionTool,
    OfferedTools,
    arguments_of_text,
    choice_of,
    function_name,
    invalid,
    unsupported,
)

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
# Values of `include`; the last two add nothing which this server could have.
INCLUDED = (_LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources")
# Types of items: calls of tools, and what tools gave.
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
OUTPUTS = tuple(f"{each}_output" for each in CALLS)
ITEMS = ("message", "reasoning", "web_search_call", *CALLS, *OUTPUTS)
_PARTS = frozenset({"content", "reasoning_content", "tool_calls", "tool_call_id"})  # of a message that says something
_SAME_IN_CHATS = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "user", "prompt_cache_key", "seed", "stop", "top_k"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "chat_template_kwargs"),
    *("cache_salt", "priority", "service_class"),
)

_decode_tool = msgspec.json.Decoder(FunctionTool).decode


class InputPart(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """One item of the conversation: a message, a call of a tool, its output, or reasoning.

    Attributes:
        input: Input of a custom tool.
        action: What a tool did that OpenAI's servers or the client's own shell ran.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


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


class ResponseStreamOptions(msgspec.Struct):
    """Options of a streamed response, all without effect here."""


class ResponsesFields(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses`. The last fields, from `seed` on, are those of chat completions.

    Attributes:
        store: Accepted and without effect, because most clients send the default, true.
    """

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | ChoiceField | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    truncation: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    cache_salt: str | None = None
    priority: int | None = None
    service_class: str | None = None


@dataclass(frozen=True, slots=True)
class TranslatedResponse:
    """A response's request as a chat, and the tools whose calls its answer may have."""

    chat: TranslatedChat
    tools: OfferedTools


def chat_of_response(fields: ResponsesFields) -> TranslatedResponse:
    """Return the chat completion that answers the request.

    Raises:
        RequestError: An item, a part, a tool or a choice has no counterpart in a chat completion.
    """
    places = FieldPlaces(_PLACES)
    offered = _offered(fields, places)
    messages = _messages(fields, places)
    # Without a limit of tokens, the answer to nothing would go on to the end of the context.
    if not any(
        message[part] for message in messages[bool(fields.instructions) :] for part in message if part in _PARTS
    ):
        raise invalid("input", "is empty; send a text, or items with a text, a call or its output")
    chat: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": fields.max_output_tokens,
        "tool_choice": choice_of(fields.tool_choice, offered),
        "tools": offered.functions or None,
        "truncate_prompt_tokens": _truncation(fields.truncation),
    }
    for name in _SAME_IN_CHATS:
        chat[name] = getattr(fields, name)
    if bytes(fields.structured_outputs) != b"null":
        chat["structured_outputs"] = fields.structured_outputs
    if fields.text is not None:
        chat |= {"verbosity": fields.text.verbosity, "response_format": _format(fields.text.format)}
    if fields.reasoning is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    if fields.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    given = {name: value for name, value in (chat | _logprobs(fields)).items() if value is not None}
    return TranslatedResponse(TranslatedChat(given, places, tuple(offered.left_out)), offered)


def _offered(fields: ResponsesFields, places: FieldPlaces) -> OfferedTools:
    offered = OfferedTools(places)
    for i, tool in enumerate(fields.tools or ()):
        try:
            offered.offer(f"tools[{i}]", _decode_tool(tool))
        except msgspec.ValidationError as error:
            raise RequestError(f"tools[{i}]: {error}.", param=f"tools[{i}]", code="invalid_type") from None
    return offered


def _truncation(given: str | None) -> int | None:
    """Return the number of prompt tokens that are kept; -1 means the last ones that fit into the context."""
    if given not in (None, "auto", "disabled"):
        raise RequestError(
            f'truncation must be "auto" or "disabled", got {shown(given)}.', param="truncation", code="invalid_value"
        )
    return -1 if given == "auto" else None


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
                messages.append({"role": "user" if item.role is None else item.role, "content": content})
        case kind if kind in CALLS:
            calls = _of_assistant(messages, "").setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": _called_function(item)})
            return f".tool_calls[{len(calls) - 1}].function"
        case kind if kind in OUTPUTS:
            content = _text(f"{place}.output", item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case "reasoning":
            text = "\n".join(part.text or "" for part in _parts(item.content) or _parts(item.summary))
            _of_assistant(messages, "reasoning_content")["reasoning_content"] = text
        case "web_search_call":
            text = f"[searched the web: {bytes(item.action).decode()}]"
            _of_assistant(messages, "content")["content"] = text
        case _:
            raise unsupported(f"{place}.type", f"items of type {shown(item.type)} are not supported")
    return ""


def _called_function(item: InputItem) -> dict[str, Any]:
    """Return the chat's function that an earlier call of a tool means."""
    match item.type:
        case "custom_tool_call":
            return {"name": function_name(item.name, item.namespace), "arguments": arguments_of_text(item.input)}
        case "local_shell_call":
            return {"name": "local_shell", "arguments": bytes(item.action).decode()}
    return {"name": function_name(item.name, item.namespace), "arguments": item.arguments or "{}"}


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
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise unsupported(f"{place}[{i}]", f"only text is supported, got a part of type {shown(part.type)}")
        texts.append(text)
    return "\n".join(texts)


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":  # A schema there is enforced or refused as in a chat.
        given = {} if bytes(wanted.schema) == b"null" else {"schema": wanted.schema}
        return {"type": wanted.type} | given
    schema: dict[str, Any] = {"name": wanted.name, "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}


def _logprobs(fields: ResponsesFields) -> dict[str, Any]:
    for each in fields.include or ():
        if each not in INCLUDED:
            raise unsupported("include", f"{shown(each)} is not supported")
    if _LOGPROBS not in (fields.include or ()) and not fields.top_logprobs:
        return {}
    return {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
