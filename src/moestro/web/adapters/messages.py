"""Anthropic's Messages API: its requests as chat requests, and its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from moestro.core.clients import is_too_deep
from moestro.errors import RequestError, shown
from moestro.web.adapters.field_places import FieldPlaces, TranslatedChat

# Translates the body of Anthropic's `POST /v1/messages` to that of a chat completion.

# Places of a chat's body, by which its errors name fields, with those of a message.
_PLACES = {
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
THINKING_TYPES = ("enabled", "disabled", "adaptive", "between_tools")
MAX_BUDGET = 2**31 - 1  # Tokens of thinking.
# Roles that Claude Code (from 2.1.154 on) gives to its context and messages, read as vLLM does.
_ROLES = {"ctx": "user", "msg": "user"}
ROLES = ("user", "assistant", "system", *_ROLES)
_PlacedMessage = tuple[dict[str, Any], dict[str, str]]  # A chat message, and its places in the client's body.
HOSTED = ("web_search_", "web_fetch_")  # Tools of Anthropic's servers that clients offer whether or not one has them.
# Types of blocks that have a text, and of those that only messages of the assistant have.
TEXT_BLOCKS = (
    *("text", "document", "search_result", "tool_reference", "web_search_result", "web_fetch_result"),
    *("web_search_tool_result_error", "web_fetch_tool_result_error", "web_fetch_tool_error"),
)
ASSISTANT_BLOCKS = (
    *("tool_use", "thinking", "redacted_thinking", "server_tool_use"),
    *("web_search_tool_result", "web_fetch_tool_result"),
)


class DocumentSource(msgspec.Struct):
    """Contents of a document: a text, or blocks of text."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None
    media_type: str | None = None


class Block(msgspec.Struct):
    """One content block of a message, of the system prompt, of a tool's result, or a result of a search.

    Attributes:
        source: Contents of a document, or the origin of a search result.
        tool_name: Tool that a search for tools has found.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    tool_use_id: str | None = None
    content: str | list[Block] | Block | None = None
    source: str | DocumentSource | None = None
    title: str | None = None
    context: str | None = None
    url: str | None = None
    tool_name: str | None = None
    error_code: str | None = None
    is_error: bool | None = None  # Templates have no place for it; the text of the result says it.


class ConversationTurn(msgspec.Struct):
    """One message of the conversation."""

    role: str
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    """One tool of the client. Tools that Anthropic's servers run have another `type`."""

    name: str
    input_schema: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b'{"type":"object"}'))
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """Whether, and which, tools the model uses."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks first, and the most tokens of its thinking."""

    type: str
    budget_tokens: int | None = None


class SenderMetadata(msgspec.Struct):
    """The sender of the request."""

    user_id: str | None = None


class OutputFormat(msgspec.Struct):
    """JSON schema of the answer."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))


class OutputConfig(msgspec.Struct):
    """Form of the answer, and the effort spent on it."""

    format: OutputFormat | None = None
    effort: str | None = None


class ContextEdit(msgspec.Struct):
    """An edit of the conversation that Anthropic's servers make before the model reads it."""

    type: str
    keep: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


class ContextManagement(msgspec.Struct):
    """Edits of the conversation. One that keeps all is no edit; no other is made here."""

    edits: list[ContextEdit] | None = None


class CountFields(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: the fields that shape a prompt."""

    messages: list[ConversationTurn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # Older name of `output_config.format`.
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # A field of vLLM.


class MessagesFields(CountFields, kw_only=True):
    """Body of `POST /v1/messages`. The last three fields are Moestro's, as in chat completions."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: SenderMetadata | None = None
    cache_salt: str | None = None
    priority: int | None = None
    service_class: str | None = None


def chat_of_message(fields: MessagesFields) -> TranslatedChat:
    """Return the chat completion that answers the request.

    Raises:
        RequestError: A block, a tool or a choice has no counterpart in a chat completion.
    """
    chat = chat_of_count(fields)
    sampling: dict[str, Any] = {
        "max_completion_tokens": fields.max_tokens,
        "stop": fields.stop_sequences or None,
        "user": fields.metadata.user_id if fields.metadata is not None else None,
    }
    for name in ("temperature", "top_p", "top_k", "cache_salt", "priority", "service_class"):
        sampling[name] = getattr(fields, name)
    if fields.thinking is not None:
        sampling["thinking_token_budget"] = _budget(fields.thinking)
    if fields.stream:
        # The first event has the tokens of the prompt, and the last one those of the answer.
        sampling |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return TranslatedChat(chat.fields | _given(sampling), chat.places, chat.left_out)


def chat_of_count(fields: CountFields) -> TranslatedChat:
    """Return the fields of a chat completion that shape its prompt; raises as `chat_of_message` does."""
    if not fields.messages:  # A chat may consist of the system prompt alone.
        raise _invalid("messages", "is an empty list; send at least one message")
    _refuse_edits(fields.context_management)
    places = FieldPlaces(_PLACES)
    messages: list[dict[str, Any]] = []
    for message, own_places in _messages(fields):
        for place, own in own_places.items():
            places.add(f"messages[{len(messages)}]{place}", own)
        messages.append(message)
    chat: dict[str, Any] = {"model": fields.model, "messages": messages}
    if fields.messages[-1].role == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    tools = {f"tools[{i}]": tool for i, tool in enumerate(fields.tools or ())}
    hosted = {place: tool.type for place, tool in tools.items() if (tool.type or "").startswith(HOSTED)}
    offered = {place: tool for place, tool in tools.items() if place not in hosted}
    if offered:
        chat["tools"] = [_tool(place, f"tools[{i}]", tool, places) for i, (place, tool) in enumerate(offered.items())]
    if fields.tool_choice is not None:
        chat |= _choice(fields.tool_choice)
    variables = _thinking(fields.thinking)
    if fields.chat_template_kwargs is not None:
        places.add("chat_template_kwargs", "chat_template_kwargs")
        variables |= fields.chat_template_kwargs
    chat["chat_template_kwargs"] = variables or None
    left_out = tuple(f"{place} ({kind})" for place, kind in hosted.items())
    return TranslatedChat(_given(chat | _output(fields, places)), places, left_out)


def _refuse_edits(management: ContextManagement | None) -> None:
    for i, edit in enumerate((management and management.edits) or ()):
        if bytes(edit.keep) != b'"all"':
            text = f"edits of type {shown(edit.type)} are made here with keep: all alone; send the edited conversation"
            raise _unsupported(f"context_management.edits[{i}]", text)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _messages(fields: CountFields) -> Iterator[_PlacedMessage]:
    if fields.system:
        yield {"role": "system", "content": _text("system", fields.system)}, {"": "system"}
    for i, turn in enumerate(fields.messages):
        yield from _turn(f"messages[{i}]", turn)


def _turn(place: str, turn: ConversationTurn) -> Iterator[_PlacedMessage]:
    """Yield the chat messages of one message: results of tools are messages of their own."""
    if turn.role == "assistant":
        yield _assistant(place, turn)
        return
    role = _ROLES.get(turn.role, turn.role)
    if role not in ("user", "system"):
        raise _invalid(f"{place}.role", f"must be user or assistant, got {shown(turn.role)}")
    if isinstance(turn.content, str) or not turn.content:
        yield {"role": role, "content": turn.content or ""}, {"": place}
        return
    texts: list[str] = []
    for i, block in enumerate(turn.content):
        where = f"{place}.content[{i}]"
        if block.type != "tool_result":
            texts.append(_block_text(where, block))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}, {"": place}
            texts = []
        content = _text(f"{where}.content", block.content)
        message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        yield message, {"": where, ".tool_call_id": f"{where}.tool_use_id"}
    if texts:
        yield {"role": role, "content": "\n".join(texts)}, {"": place}


def _assistant(place: str, turn: ConversationTurn) -> _PlacedMessage:
    own_places = {"": place}
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}, own_places
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        where = f"{place}.content[{i}]"
        match block.type:
            case "tool_use":
                call = f".tool_calls[{len(calls)}]"
                own_places |= {call: where, f"{call}.function": where, f"{call}.function.arguments": f"{where}.input"}
                function = {"name": block.name, "arguments": bytes(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # Encrypted by another server, so that no text of it is left.
            case "server_tool_use":
                texts.append(f"[used {block.name}: {bytes(block.input).decode()}]")
            case "web_search_tool_result" | "web_fetch_tool_result":
                texts.append(f"[found: {_text(f'{where}.content', block.content)}]")
            case _:
                texts.append(_block_text(where, block))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message, own_places


def _text(place: str, content: str | list[Block] | Block | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Block):
        return _block_text(place, content)
    return "\n".join([_block_text(f"{place}[{i}]", block) for i, block in enumerate(content)])


def _block_text(place: str, block: Block) -> str:
    """Return the text of a block for the model."""
    match block:
        case Block(type="text", text=str(text)):
            return text
        case Block(type="text"):
            param = f"{place}.text"
            raise RequestError(f"{param} is missing; send a text.", param=param, code="invalid_value")
        case Block(type="document", source=DocumentSource() as source):
            return _lines(block.title, block.context, _document(f"{place}.source", source))
        case Block(type="search_result", source=str(origin)):
            return _lines(block.title, origin, _text(f"{place}.content", block.content))
        case Block(type="web_search_result" | "web_fetch_result"):
            head = " ".join(each for each in (block.title, block.url) if each)
            return _lines(head, _text(f"{place}.content", block.content))
        case Block(type="web_search_tool_result_error" | "web_fetch_tool_result_error" | "web_fetch_tool_error"):
            return f"error {block.error_code}"
        case Block(type="tool_reference", tool_name=str(name)):
            return f"The tool {name} can be called."
    raise _unsupported(place, f"only text is supported here, got a block of type {shown(block.type)}")


def _document(place: str, source: DocumentSource) -> str:
    if source.type not in ("text", "content"):
        raise _unsupported(place, f"only text is supported here, got a document of type {shown(source.type)}")
    return source.data or _text(f"{place}.content", source.content)


def _lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def _tool(place: str, in_chat: str, tool: ToolDefinition, places: FieldPlaces) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise _unsupported(place, f"tools that the server runs are not supported, got type {shown(tool.type)}")
    places.add(in_chat, place)
    places.add(f"{in_chat}.function", place)
    places.add(f"{in_chat}.function.parameters", f"{place}.input_schema")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": _given(function)}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    serial = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    match choice.type:
        case "auto" | "none":
            return {"tool_choice": choice.type} | serial
        case "any":
            return {"tool_choice": "required"} | serial
        case "tool":
            if choice.name is None:
                raise _invalid("tool_choice.name", "is missing; send the name of a tool")
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}} | serial
    raise _invalid("tool_choice.type", f"must be auto, any, tool or none, got {shown(choice.type)}")


def _thinking(thinking: Thinking | None) -> dict[str, Any]:
    """Return the variables of templates that can think or not. Without a wish, the template's default holds."""
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return {}
    if thinking.type not in THINKING_TYPES:
        text = f"must be one of {', '.join(THINKING_TYPES)}, got {shown(thinking.type)}"
        raise _invalid("thinking.type", text)
    is_on = thinking.type == "enabled"
    return {"enable_thinking": is_on, "thinking": is_on}  # Qwen's and GLM's, DeepSeek's name.


def _budget(thinking: Thinking) -> int | None:
    budget = thinking.budget_tokens
    if budget is not None and not 1 <= budget <= MAX_BUDGET:
        raise _invalid("thinking.budget_tokens", f"must be between 1 and {MAX_BUDGET}, got {budget}")
    return None if thinking.type == "disabled" else budget


def _output(fields: CountFields, places: FieldPlaces) -> dict[str, Any]:
    config = fields.output_config or OutputConfig()
    chat: dict[str, Any] = {}
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    wanted = config.format or fields.output_format
    if wanted is not None:
        place = "output_format" if config.format is None else "output_config.format"
        if wanted.type != "json_schema":
            raise _invalid(f"{place}.type", f"must be json_schema, got {shown(wanted.type)}")
        places.add("response_format.json_schema", place)
        schema = {"name": "answer", "schema": wanted.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _invalid(param: str, text: str) -> RequestError:
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def _unsupported(param: str, text: str) -> RequestError:
    return RequestError(f"{param}: {text}.", param=param, code="unsupported_parameter")


# Translates chat completions, whole and in chunks, to Anthropic's messages and events.
#
# A chat completion comes as its JSON in builtin types, so that fields which this version lacks are simply absent.

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
