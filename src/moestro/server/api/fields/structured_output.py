"""Reads the fields by which a client asks for structured output, and checks the grammar that they describe."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from moestro.core.grammar import Grammar
from moestro.core.json_elements import MAX_DEPTH, is_too_deep
from moestro.errors import GrammarTimeoutError, RequestError, shown
from moestro.grammar.checker import MAX_CHECKS, MAX_TRIES, GrammarChecker, GrammarVerdict
from moestro.grammar.host import CHECK, LONGEST_WAIT_S, TRY
from moestro.server.api.fields.protocol import GenerationFields, ResponseFormat, StructuredOutputs
from moestro.text.parsing.answer_grammars import enforced_schema
from moestro.text.thread_pool import PrepareThreads

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
