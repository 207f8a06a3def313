"""Validates the fields of a chat: its messages, its tools, and the arguments of its template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from moestro.errors import RequestError, shown
from moestro.server.api.fields.protocol import (
    AllowedChoice,
    CallField,
    ChatFields,
    ContentPart,
    Message,
    ToolField,
)
from moestro.server.api.fields.request_fields import wrong_type
from moestro.server.api.fields.structured_output import refuse_unenforced
from moestro.text.chats.chat_format import NO_TOOLS, ToolUse
from moestro.text.chats.chat_history import EFFORTS, calls_for_templates
from moestro.text.parsing.answer_grammars import enforced_arguments
from moestro.text.parsing.output_parser import ToolSpec
from moestro.text.parsing.parser_input import NAME_LIMIT
from moestro.text.tokenizer import TemplateOptions

MAX_TOOLS = 512
ROLES = ("developer", "system", "user", "assistant", "tool")
VERBOSITIES = ("low", "medium", "high")
# Fields of messages that a single role has.
_OF_ONE_ROLE = {
    "reasoning": "assistant", "reasoning_content": "assistant", "refusal": "assistant", "tool_call_id": "tool",
}  # fmt: skip
# What to do in place of a tool of another type.
_TOOL_REMEDIES = {
    "custom": "; send a function with one text, or send the tool to /v1/responses",
    "namespace": "; send its functions one by one, or send the tool to /v1/responses",
}
# Arguments of the rendering itself, which are no variables of a template.
RESERVED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "messages",
        "return_assistant_tokens_mask", "tokenize", "tools",
    }
)  # fmt: skip


def check_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return a chat's messages as chat templates read them; RequestError names an invalid one."""
    if not messages:
        raise invalid("messages", "is an empty list; send at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def unread_in_messages(messages: Sequence[Message]) -> list[str]:
    """Return the places of fields that say something, and that no message of their role has."""
    return [
        f"messages[{i}].{name}"
        for i, message in enumerate(messages)
        for name, role in _OF_ONE_ROLE.items()
        if getattr(message, name) and message.role != role
    ]


class ToolsOffer(NamedTuple):
    """Use of tools that a request allows.

    Attributes:
        tools: Tools in the API's form, for the template.
        left_out: Places of what no grammar enforces of their schemas.
    """

    use: ToolUse
    tools: tuple[dict[str, Any], ...] = ()
    left_out: tuple[str, ...] = ()


def offered_tools(fields: ChatFields) -> ToolsOffer:
    """Return the use of tools that the request allows. Tools without a choice mean `auto`.

    Raises:
        RequestError: A tool or the choice is invalid, or a strict schema cannot be enforced.
    """
    tools = [_tool(i, tool) for i, tool in enumerate(fields.tools or ())]
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"may hold {MAX_TOOLS} tools at most, got {len(tools)}")
    choice = fields.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, tools = _allowed(choice, tools)
    use, left_out = _use(choice, tools, is_parallel=fields.parallel_tool_calls is not False)
    return ToolsOffer(use, tuple(tool.given for tool in tools), left_out)


def _use(
    choice: str | dict[str, Any] | None, tools: Sequence[_OfferedTool], *, is_parallel: bool
) -> tuple[ToolUse, tuple[str, ...]]:
    """Return the use of `tools` that a choice allows, and the places of what is not enforced of their schemas."""
    if choice == "none" or (not tools and choice in (None, "auto")):
        return NO_TOOLS, ()
    if not tools:
        raise invalid("tool_choice", "needs tools; send some, or leave it out")
    specs = tuple(tool.spec for tool in tools)
    if choice in (None, "auto"):
        left_out = tuple(f"{tool.place}.strict" for tool in tools if tool.is_strict)
        return ToolUse(choice="auto", tools=specs, is_parallel=is_parallel), left_out
    if choice == "required":
        left_out = tuple(each for tool in tools for each in _unenforced(tool))
        return ToolUse(choice="required", tools=specs, is_parallel=is_parallel), left_out
    if not isinstance(choice, dict):
        words = f'must be "none", "auto", "required", a named function or allowed tools, got {shown(choice)}'
        raise invalid("tool_choice", words)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    tool = _named("tool_choice", choice.get("type"), name, tools)
    return ToolUse(choice="named", tools=(tool.spec,)), _unenforced(tool)


def _allowed(choice: dict[str, Any], tools: Sequence[_OfferedTool]) -> tuple[str, list[_OfferedTool]]:
    """Return the mode of a choice among allowed tools, and these tools.

    Raises:
        RequestError: The choice has another form, or one of its tools is not offered.
    """
    try:
        allowed = msgspec.convert(choice, AllowedChoice).allowed_tools
    except msgspec.ValidationError as error:
        raise wrong_type(error, "tool_choice") from None
    if allowed.mode not in ("auto", "required"):
        raise invalid("tool_choice.allowed_tools.mode", f'must be "auto" or "required", got {shown(allowed.mode)}')
    if not allowed.tools:
        raise invalid("tool_choice.allowed_tools.tools", 'is empty; name tools, or send the choice "none"')
    found = {
        _named(f"tool_choice.allowed_tools.tools[{i}]", each.type, each.function.name, tools).place
        for i, each in enumerate(allowed.tools)
    }
    return allowed.mode, [tool for tool in tools if tool.place in found]


def template_options(fields: ChatFields) -> TemplateOptions:
    """Return the arguments of the rendering, with the variables that the request itself sets.

    Raises:
        RequestError: An argument is invalid, or contradicts another one.
    """
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        text = "cannot be used together with add_generation_prompt: true, which begins a new message"
        raise invalid("continue_final_message", text)
    given = fields.chat_template_kwargs or {}
    if wrong := sorted(given.keys() & RESERVED):
        raise invalid("chat_template_kwargs", f"may not set {wrong[0]}, which is no variable of a template")
    _check_word("reasoning_effort", fields.reasoning_effort, EFFORTS)
    _check_word("verbosity", fields.verbosity, VERBOSITIES)
    return TemplateOptions(
        add_generation_prompt=not continues and fields.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=given,
        template=fields.chat_template,
    )


def _check_word(param: str, given: str | None, allowed: Sequence[str]) -> None:
    if given is not None and given not in allowed:
        raise invalid(param, f"must be one of {', '.join(allowed)}, got {shown(given)}")


def invalid(param: str, text: str) -> RequestError:
    """Return the error for an invalid value of the field `param`."""
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


@dataclass(frozen=True, slots=True)
class _OfferedTool:
    """One tool, as it was given, the place of its function, and whether its schema must be enforced as a whole."""

    spec: ToolSpec
    given: dict[str, Any]
    place: str
    is_strict: bool


def _tool(i: int, given: dict[str, Any]) -> _OfferedTool:
    place = f"tools[{i}]"
    if isinstance(kind := given.get("type"), str) and kind != "function":
        raise invalid(f"{place}.type", f"must be function, got {shown(kind)}{_TOOL_REMEDIES.get(kind, '')}")
    try:
        tool = msgspec.convert(given, ToolField)
    except msgspec.ValidationError as error:
        raise wrong_type(error, place) from None
    name, parameters = tool.function.name, tool.function.parameters
    if not 1 <= len(name.strip()) == len(name) <= NAME_LIMIT or not name.isprintable():
        text = f"must have 1 to {NAME_LIMIT} printable characters, without spaces around them, got {shown(name)}"
        raise invalid(f"{place}.function.name", text)
    if parameters is False:
        raise invalid(f"{place}.function.parameters", "allows no arguments at all; send an object's schema")
    spec = ToolSpec(name, {"type": "object"} if parameters is True else parameters or {})
    return _OfferedTool(spec, given, f"{place}.function", bool(tool.function.strict))


def _unenforced(tool: _OfferedTool) -> tuple[str, ...]:
    """Return the places of what no grammar enforces of a tool whose call is forced; RequestError if it must be."""
    place, left_out = f"{tool.place}.parameters", enforced_arguments(tool.spec.parameters).left_out
    if tool.is_strict:
        refuse_unenforced(left_out, place)
    return tuple(f"{place}.{each}" for each in left_out)


def _named(place: str, kind: object, name: object, tools: Sequence[_OfferedTool]) -> _OfferedTool:
    """Return the tool that a choice at `place` means."""
    if kind != "function" or not isinstance(name, str):
        raise invalid(place, 'must have the form {"type": "function", "function": {"name": ...}}')
    found = next((tool for tool in tools if tool.spec.name == name), None)
    if found is None:
        raise invalid(place, f"names the tool {shown(name)}, which is not in tools")
    return found


def _message(place: str, message: Message) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {shown(message.role)}")
    calls = message.tool_calls or ()
    if calls and message.role != "assistant":
        raise invalid(f"{place}.tool_calls", "belongs to messages of the assistant")
    is_answer = message.role == "assistant"  # The model may have given neither content nor calls.
    if message.content is None and not is_answer:
        raise invalid(f"{place}.content", "is missing; send a text")
    content = message.content or (is_answer and message.refusal) or ""
    made: dict[str, Any] = {
        "role": message.role,
        "content": content if isinstance(content, str) else _text(place, content),
    }
    if message.name is not None:
        made["name"] = message.name
    if calls:
        made["tool_calls"] = calls_for_templates([_call(f"{place}.tool_calls", call) for call in calls])
    if message.role == "tool" and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None and is_answer:
        made["reasoning"] = made["reasoning_content"] = reasoning
    return made


def _call(place: str, call: CallField) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise invalid(place, f"must be calls of type function, got {shown(call.type)}")
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}


def _text(place: str, parts: list[ContentPart]) -> str:
    """Return the parts' texts, one a line, as vLLM joins them for templates that need a string."""
    texts = []
    for i, part in enumerate(parts):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            where = f"{place}.content[{i}]"
            raise RequestError(f"{where}: only parts of type text are supported, got {shown(part.type)}.", param=where)
        texts.append(text)
    return "\n".join(texts)
