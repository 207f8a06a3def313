"""Validates the fields of a chat and of structured output: messages, tools, the template's arguments, and grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from moestro.core.clients import MAX_DEPTH, is_too_deep
from moestro.core.request import Grammar
from moestro.errors import GrammarTimeoutError, RequestError, shown
from moestro.grammar.host import CHECK, LONGEST_WAIT_S, MAX_CHECKS, MAX_TRIES, TRY, GrammarChecker, GrammarVerdict
from moestro.server.api.protocol import (
    AllowedChoice,
    CallField,
    ChatFields,
    ContentPart,
    GenerationFields,
    Message,
    ResponseFormat,
    StructuredOutputs,
    ToolField,
)
from moestro.text.chats.chat_format import NO_TOOLS, ToolUse
from moestro.text.chats.chat_template import EFFORTS, calls_for_templates
from moestro.text.parsing.answer_grammars import enforced_arguments, enforced_schema
from moestro.text.parsing.output_parser import ToolSpec
from moestro.text.parsing.parser_input import NAME_LIMIT
from moestro.text.thread_pool import PrepareThreads
from moestro.text.tokenizer import TemplateOptions
from moestro.web.adapters.field_places import wrong_type

MAX_GRAMMAR_BYTES = 128 << 10  # A schema of a hundred tools has half of it.
MAX_GRAMMAR_CHOICES = 4096
# New grammars that wait for a try, which takes 0.03 s at most, and slow ones that wait for a check, which takes 2 s.
# Where more come, the client that has most waiting loses its newest.
MAX_WAITING_TRIES, MAX_WAITING_CHECKS = 64, 16
# No whitespace between the elements of JSON; llguidance reads it in the schema.
_NO_SPACE: dict[str, object] = {"whitespace_flexible": False, "whitespace_pattern": None}
# Older fields of vLLM, with their names in `structured_outputs`.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_GUIDED |= {"regex": "regex", "ebnf": "grammar"}  # SGLang's names


class RequestedGrammar(msgspec.Struct, frozen=True):
    """Grammar of an answer, and the field of the request that asks for it.

    Attributes:
        left_out: Places of keywords of a JSON schema that no grammar enforces.
    """

    grammar: Grammar
    param: str
    left_out: tuple[str, ...] = ()


def requested_grammar(fields: GenerationFields) -> RequestedGrammar | None:
    """Return the grammar that the request asks for; None means that the answer may be any text.

    Raises:
        RequestError: A field is invalid, or several ask for a grammar.
    """
    found = [
        *_of_format(fields.response_format),
        *_of_structured(fields.structured_outputs),
        *(each for name, kind in _GUIDED.items() for each in _of_kind(kind, getattr(fields, name), name)),
    ]
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise _invalid(found[1].param, f"cannot be used together with another grammar, got {names}")
    if found:
        refuse_large_grammar(found[0].grammar, found[0].param)
    return found[0] if found else None


def refuse_large_grammar(grammar: Grammar, param: str) -> None:
    """Raise RequestError, which names the field `param`, if the text of `grammar` is too long."""
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise _invalid(param, f"may have {MAX_GRAMMAR_BYTES} bytes at most")


def _invalid(param: str, text: str) -> RequestError:
    return RequestError(f"{param} {text}.", param=param, code="invalid_value")


def _of_format(requested: ResponseFormat | None) -> list[RequestedGrammar]:
    if requested is None:
        return []
    if requested.type not in ("text", "json_object", "json_schema"):
        raise _invalid("response_format.type", f"must be text, json_object or json_schema, got {shown(requested.type)}")
    framed = requested.json_schema
    if requested.schema is not None:
        if framed is not None:
            raise _invalid("response_format.schema", "cannot be used together with response_format.json_schema")
        place, schema, is_strict = "response_format.schema", requested.schema, False
    elif framed is not None and framed.schema is not None:
        place, schema, is_strict = "response_format.json_schema.schema", framed.schema, bool(framed.strict)
    elif requested.type == "json_schema":
        at = "response_format.json_schema"
        raise RequestError(f"{at}.schema is missing; send a JSON schema.", param=at, code="invalid_value")
    else:
        return [RequestedGrammar(Grammar("json_object"), "response_format")] if requested.type == "json_object" else []
    if requested.type == "text":
        raise _invalid(place, "belongs to the type json_schema, and the type is text")
    return [_schema(schema, place, is_strict=is_strict)]


def _of_structured(requested: StructuredOutputs | None) -> list[RequestedGrammar]:
    if requested is None:
        return []
    found = [
        each
        for kind in ("json", "regex", "choice", "grammar")
        for each in _of_kind(kind, getattr(requested, kind), f"structured_outputs.{kind}")
    ]
    if requested.json_object:
        found.append(RequestedGrammar(Grammar("json_object"), "structured_outputs.json_object"))
    if not found:
        raise _invalid("structured_outputs", "must have one of json, regex, choice, grammar and json_object")
    return [_spaced(each, requested) for each in found]


def _of_kind(kind: str, value: Any, place: str) -> list[RequestedGrammar]:
    """Return the grammar of a value of one kind; an empty list means that the value is absent."""
    if value is None:
        return []
    match kind:
        case "json":
            return [_schema(value, place)]
        case "choice":
            grammar = _choice(value, place)
        case _:
            if not value:
                raise _invalid(place, "is empty")
            grammar = Grammar("regex" if kind == "regex" else "lark", value)
    return [RequestedGrammar(grammar, place)]


def _schema(given: dict[str, Any] | str, place: str, *, is_strict: bool = False) -> RequestedGrammar:
    """Return the grammar of a JSON schema, which may be given as text."""
    if not isinstance(given, str):
        enforced = enforced_schema(given)
        if is_strict:
            refuse_unenforced(enforced.left_out, place)
        grammar = Grammar("json_schema", msgspec.json.encode(enforced.schema).decode())
        return RequestedGrammar(grammar, place, tuple(f"{place}.{each}" for each in enforced.left_out))
    if len(given) > MAX_GRAMMAR_BYTES:
        raise _invalid(place, f"may have {MAX_GRAMMAR_BYTES} bytes at most")
    if is_too_deep(given.encode()):
        raise _invalid(place, f"may be nested {MAX_DEPTH} levels deep")
    try:
        return _schema(msgspec.json.decode(given, type=dict[str, Any]), place)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(place, f"is not a JSON schema: {shown(error)}") from None


def refuse_unenforced(left_out: Sequence[str], place: str) -> None:
    """Raise RequestError for the first keyword that no grammar enforces, of the strict JSON schema at `place`."""
    if left_out:
        at = f"{place}.{left_out[0]}"
        raise RequestError(
            f"{shown(at)} cannot be enforced, and strict: true asks for all of the schema. Leave the keyword out, or"
            " strict: then it is a description.",
            param=shown(at),
            code="unsupported_schema",
        )


def _choice(choices: Sequence[str], place: str) -> Grammar:
    if not 1 <= len(choices) <= MAX_GRAMMAR_CHOICES:
        raise _invalid(place, f"must hold 1 to {MAX_GRAMMAR_CHOICES} texts, got {len(choices)}")
    return Grammar("choice", msgspec.json.encode(choices).decode())


def _spaced(requested: RequestedGrammar, given: StructuredOutputs) -> RequestedGrammar:
    """Apply the options about whitespace to a grammar of JSON."""
    if not given.disable_any_whitespace and given.whitespace_pattern is None:
        return requested
    if not requested.grammar.kind.startswith("json"):
        raise _invalid("structured_outputs", "has options about whitespace, which only JSON has")
    pattern = None if given.disable_any_whitespace else given.whitespace_pattern
    schema: dict[str, Any] = msgspec.json.decode(requested.grammar.text or b'{"type": "object"}')
    own = schema.get("x-guidance")
    options = (own if isinstance(own, dict) else {}) | {"whitespace_pattern": pattern}
    changed = schema | {"x-guidance": options | ({} if pattern else _NO_SPACE)}
    return msgspec.structs.replace(requested, grammar=Grammar("json_schema", msgspec.json.encode(changed).decode()))


class GrammarGate:
    """Lets requests pass whose grammar compiles; others get a 400. New grammars are checked beside the event loop.

    Args:
        checker: What checks grammars; None means that the engines compute no logits, so nothing follows a grammar.
        max_wait_s: Longest time that a request waits for its check.
    """

    def __init__(self, checker: GrammarChecker | None, max_wait_s: float = LONGEST_WAIT_S) -> None:
        self._checker = checker
        self._max_wait_s = max_wait_s
        self._try_threads = PrepareThreads(MAX_WAITING_TRIES, MAX_TRIES)
        self._check_threads = PrepareThreads(MAX_WAITING_CHECKS, MAX_CHECKS)  # Slow ones delay other slow ones alone.
        self._checks: dict[tuple[Hashable, Grammar], asyncio.Future[GrammarVerdict]] = {}

    async def check(self, requested: RequestedGrammar, client: Hashable = None) -> Grammar:
        """Return the grammar, if it can be used, with what the check has found of it.

        Args:
            client: Name of the client. Clients take turns.

        Raises:
            RequestError: It cannot; the text says why and names the field.
            BusyError: Too many grammars wait for a check, and no client has more of them than this one.
            GrammarTimeoutError: The check takes too long. It goes on, so that a later request finds its result.
        """
        checker = self._checker
        if checker is None:
            text = f"{requested.param} is not supported by these engines, which compute no logits. Leave it out."
            raise RequestError(text, param=requested.param, code="unsupported_parameter")
        grammar = requested.grammar
        verdict = checker.known(grammar)
        if verdict is None:
            try:
                async with asyncio.timeout(self._max_wait_s):
                    verdict = await self._check_new(checker, grammar, client)
            except TimeoutError:
                raise GrammarTimeoutError(requested.param, self._max_wait_s) from None
        if verdict.error is not None:
            text = f"{requested.param} cannot be used as a grammar: {shown(verdict.error)}."
            raise RequestError(text, param=requested.param, code="invalid_grammar")
        return replace(grammar, is_light=verdict.is_light)

    async def _check_new(self, checker: GrammarChecker, grammar: Grammar, client: Hashable) -> GrammarVerdict:
        """Check a grammar once for all requests of a client that ask for it meanwhile, whichever of them ends.

        Another client's check of the same grammar may wait long behind other grammars of that client.
        """
        name = client, grammar
        check = self._checks.get(name)
        if check is None:
            check = asyncio.ensure_future(self._try_and_check(checker, grammar, client))
            self._checks[name] = check
            check.add_done_callback(lambda done: self._end_check(name, done))
        return await asyncio.shield(check)

    async def _try_and_check(self, checker: GrammarChecker, grammar: Grammar, client: Hashable) -> GrammarVerdict:
        def check(role: str) -> GrammarVerdict | None:
            return checker.known(grammar) or checker.check(grammar, role)  # Another client's check may have ended.

        verdict = await self._try_threads.run(lambda: check(TRY), client=client)
        if verdict is None:
            verdict = await self._check_threads.run(lambda: check(CHECK), client=client)
        assert verdict is not None, "a check has a result"
        return verdict

    def _end_check(self, name: tuple[Hashable, Grammar], check: asyncio.Future[GrammarVerdict]) -> None:
        del self._checks[name]
        if not check.cancelled():
            check.exception()  # An exception that is never read would be logged.

    def close(self) -> None:
        """End the threads and processes."""
        self._try_threads.close()
        self._check_threads.close()
        if self._checker is not None:
            self._checker.close()


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
            if part.type in ("text", "refusal"):
                raise invalid(f"{where}.{part.type}", "is missing; send a text")
            raise RequestError(f"{where}: only parts of type text are supported, got {shown(part.type)}.", param=where)
        texts.append(text)
    return "\n".join(texts)
