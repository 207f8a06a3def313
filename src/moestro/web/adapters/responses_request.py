"""Translates the body of OpenAI's `POST /v1/responses` to that of a chat completion. Nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from moestro.errors import RequestError, shown
from moestro.web.adapters.field_places import FieldPlaces, TranslatedChat, wrong_type

# Tools of OpenAI's `/v1/responses`, offered as functions of a chat, and the calls of these functions translated back.
#
# A chat knows functions only. Functions inside a `namespace` get a name with the namespace before theirs. A `custom`
# tool takes free text, so its function takes one string. Tools that OpenAI's servers run are left out.

# Tools that OpenAI's servers run, which clients offer whether or not a server has them. Names may go on with a date.
HOSTED = ("web_search", "image_generation", "tool_search")
_FREE_TEXT = "input"  # The only argument of a custom tool's function.
_SEPARATOR = "__"  # Between a namespace and a name; several clients join the names of servers and tools by it.


class ToolFormat(msgspec.Struct):
    """Form of a custom tool's input."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class FunctionTool(msgspec.Struct):
    """One tool of the client: a function, a custom tool, or a namespace of these."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    strict: bool | None = None
    format: ToolFormat | None = None
    tools: list[FunctionTool] | None = None


class ToolReference(msgspec.Struct):
    """A tool by its kind and name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class ChoiceField(msgspec.Struct):
    """A tool that the model has to call, or the tools among which it may choose."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ToolReference] | None = None


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The client's tool behind a function of the chat."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def function_name(name: str | None, namespace: str | None) -> str | None:
    """Return the name of the chat's function for a tool."""
    if not namespace or name is None:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


class OfferedTools:
    """Functions of a chat, with the client's tools behind them.

    Attributes:
        functions: Tools of the chat's body.
        left_out: Places of tools that are not offered, each with its type, and of grammars that are only described.
    """

    def __init__(self, places: FieldPlaces) -> None:
        self._places = places
        self._tools: dict[str, CalledTool] = {}
        self.functions: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def offer(self, place: str, tool: FunctionTool, namespace: str | None = None) -> None:
        """Add a tool of the client.

        Raises:
            RequestError: The tool is of an unknown type, or another one gives a function of the same name.
        """
        match tool.type:
            case "function" | "custom":
                self._add(place, tool, namespace)
            case "namespace" if namespace is None:
                for i, inner in enumerate(tool.tools or ()):
                    self.offer(f"{place}.tools[{i}]", inner, tool.name)
            case kind if kind.startswith(HOSTED):
                self.left_out.append(f"{place} ({kind})")
            case _:
                text = f"tools of type {shown(tool.type)} are not supported; send function, custom or namespace"
                raise unsupported(f"{place}.type", text)

    def called(self, function: str) -> CalledTool:
        """Return the client's tool that a call of a function means."""
        return self._tools.get(function) or CalledTool(function)

    def only(self, wanted: list[ToolReference]) -> None:
        """Keep the tools to which the request limits its choice.

        Raises:
            RequestError: There are none, or a tool is not offered or has no name.
        """
        if not wanted:
            raise invalid("tool_choice.tools", 'is empty; name tools, or send the choice "none"')
        offered = [each for each in wanted if not each.type.startswith(HOSTED)]
        if unnamed := next((each.type for each in offered if each.name is None), None):
            raise unsupported("tool_choice.tools", f"a function or a custom tool has a name, got type {shown(unnamed)}")
        names = {function_name(each.name, each.namespace) for each in offered}
        if missing := sorted(str(name) for name in names if name not in self._tools):
            raise invalid("tool_choice.tools", f"names the tool {shown(missing[0])}, which is not in tools")
        self.functions = [each for each in self.functions if each["function"]["name"] in names]

    def _add(self, place: str, tool: FunctionTool, namespace: str | None) -> None:
        name = function_name(tool.name, namespace)
        own = f"tools[{len(self.functions)}]"
        self._places.add(own, place)
        self._places.add(f"{own}.function", place)
        if not tool.name or name is None:
            raise RequestError(f"{place}.name is missing; send a name.", param=f"{place}.name", code="invalid_value")
        if name in self._tools:
            raise invalid(f"{place}.name", f"is the name of two tools: {shown(name)}")
        self._tools[name] = CalledTool(tool.name, namespace, is_custom=tool.type == "custom")
        function = {"name": name, "description": tool.description, "strict": tool.strict}
        function |= _free_text(tool) if tool.type == "custom" else _parameters(tool)
        if tool.format is not None and tool.format.definition:
            self.left_out.append(f"{place}.format")  # Described, and not enforced.
        given = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": given})


def _parameters(tool: FunctionTool) -> dict[str, Any]:
    return {} if bytes(tool.parameters) == b"null" else {"parameters": tool.parameters}


def _free_text(tool: FunctionTool) -> dict[str, Any]:
    """Return description and parameters of the function for a custom tool; its grammar is described, not enforced."""
    form, rules = tool.format, ""
    if form is not None and form.definition:
        rules = f"\n\nThe input follows this {form.syntax or 'lark'} grammar:\n{form.definition}"
    text = {"type": "string", "description": "The whole input of the tool, as plain text."}
    schema = {"type": "object", "properties": {_FREE_TEXT: text}, "required": [_FREE_TEXT]}
    return {"description": f"{tool.description or ''}{rules}" or None, "parameters": schema}


def arguments_of_text(text: str | None) -> str:
    """Return the arguments of the function for a custom tool that was called with `text`."""
    return msgspec.json.encode({_FREE_TEXT: text or ""}).decode()


def text_of_arguments(arguments: str) -> str:
    """Return the input of a custom tool from its function's arguments; text of another form is the input itself."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get(_FREE_TEXT)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, str) else arguments


def choice_of(choice: str | ChoiceField | None, offered: OfferedTools) -> object:
    """Return the chat's choice of tools; a list of allowed ones limits what is offered.

    Raises:
        RequestError: The choice is of an unknown type, or names no tool.
    """
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        if choice.mode not in (None, "auto", "required"):
            raise invalid("tool_choice.mode", f'must be "auto" or "required", got {shown(choice.mode)}')
        offered.only(choice.tools or [])
        return choice.mode or "auto"
    if choice.type not in ("function", "custom"):
        text = f"only a function or a custom tool can be chosen, got type {shown(choice.type)}"
        raise unsupported("tool_choice", text)
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; send a name.", param="tool_choice.name", code="invalid_value")
    return {"type": "function", "function": {"name": function_name(choice.name, choice.namespace)}}


def invalid(param: str, text: str) -> RequestError:
    """Return the error for an invalid value of a field."""
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def unsupported(param: str, text: str) -> RequestError:
    """Return the error for a value that this server does not support."""
    return RequestError(f"{param}: {text}.", param=param, code="unsupported_parameter")


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
            raise wrong_type(error, f"tools[{i}]") from None
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
        key = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, key)
        if text is None and part.type.endswith(key):  # input_text, output_text, summary_text ...
            raise invalid(f"{place}[{i}].{key}", "is missing; send a text")
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
