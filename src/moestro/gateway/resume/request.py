"""Request of a resumable stream: its body for the first engine, and for those that continue it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from moestro.gateway.clients.paths import CHAT_PATH

Values = Mapping[str, msgspec.Raw]  # A body's fields by name, undecoded.


class InContinuation(StrEnum):
    """Treatment of a field in the continuation's body."""

    COPIED = "copied"
    REDUCED = "less the tokens received"
    LEFT_OUT = "left out"
    REFUSED = "not resumable"


@dataclass(frozen=True, slots=True)
class ContinuedField:
    """One field of a body.

    Attributes:
        treatment: Treatment of the field where the stream is resumable.
        why: Reason, for the reference table.
        neutral: Values of a refused field that request nothing. Null always requests nothing.
        unless: Further condition under which a refused field does no harm, in words.
        allows: The same condition; gets the value and the body.
        without: The same for a large field, which is not decoded: the bytes that its JSON must not contain.
    """

    name: str
    treatment: InContinuation
    why: str
    neutral: tuple[object, ...] = ()
    unless: str = ""
    allows: Callable[[Any, Values], bool] | None = None
    without: re.Pattern[bytes] | None = None

    @property
    def condition(self) -> str:
        """Treatment in words, with the values of a refused field that do no harm."""
        values = [f"it is `{msgspec.json.encode(each).decode()}`" for each in self.neutral]
        conditions = [*values, self.unless] if self.unless else values
        return f"{self.treatment}, unless {' or '.join(conditions)}" if conditions else self.treatment.value

    def is_harmless(self, body: Values) -> bool:
        """Return whether the stream of a request is resumable, as far as this field of its body matters."""
        if self.treatment is not InContinuation.REFUSED:
            return True
        if self.without is not None:
            return self.without.search(body[self.name]) is None
        value = msgspec.json.decode(body[self.name])
        if value is None:
            return True
        if any(type(value) is type(each) and value == each for each in self.neutral):
            return True
        return self.allows is not None and self.allows(value, body)


def _value(body: Values, name: str) -> Any:
    raw = body.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def _is_greedy(_seed: object, body: Values) -> bool:
    """Return whether no draw follows from the seed. An absent temperature is the server's own, which may be above 0."""
    temperature = _value(body, "temperature")
    return isinstance(temperature, int | float) and temperature == 0


def _is_one_prompt(prompt: object, _body: Values) -> bool:
    """Return whether `prompt` is one text or one list of token ids, alone or in a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt))


def _are_unused(_tools: object, body: Values) -> bool:
    return bool(_value(body, "tool_choice") == "none")


# Parts of messages other than text, by their type or, as engines allow, by their key. Strings have no bare quotes.
_MEDIA = re.compile(rb'"type"\s*:\s*"(?!(?:text|function)")|"(?:image|audio|video|input|file)(?:_\w+)?"\s*:')
_COPIED, _REDUCED, _LEFT_OUT, _REFUSED = InContinuation
_STATELESS = "depends on no earlier token"
_PROMPT = "shapes the prompt, whose token ids are continued"
_BOOKKEEPING = "changes no token"
_GRAMMAR = "the grammar would begin anew"
_SCORES = "scores of two engines differ in their last bits, and their offsets begin anew"

CONTINUED_FIELDS = (
    ContinuedField("model", _COPIED, _BOOKKEEPING),
    ContinuedField("stream", _COPIED, _BOOKKEEPING),
    ContinuedField("stream_options", _COPIED, "the router adds up the usage of all engines"),
    ContinuedField(
        "prompt", _REFUSED, "several prompts share one stream", unless="it is one prompt", allows=_is_one_prompt
    ),
    ContinuedField(
        "messages",
        _REFUSED,
        "the token ids of the prompt have no images and sounds",
        unless="all content is text",
        without=_MEDIA,
    ),
    *(
        ContinuedField(name, _LEFT_OUT, _PROMPT)
        for name in (
            *("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
            *("add_special_tokens", "documents", "reasoning_effort", "verbosity"),
            *("truncate_prompt_tokens", "truncation_side"),
        )
    ),
    *(
        ContinuedField(name, _REDUCED, "a token counts wherever it was generated")
        for name in ("max_tokens", "max_completion_tokens", "min_tokens")
    ),
    *(
        ContinuedField(name, _COPIED, _STATELESS)
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "stop_token_ids"),
            *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        )
    ),
    ContinuedField("repetition_penalty", _COPIED, "counts the tokens of prompt and answer alike"),
    *(
        ContinuedField(name, _REFUSED, "counts the tokens of the answer alone", (0, 0.0))
        for name in ("presence_penalty", "frequency_penalty")
    ),
    ContinuedField("seed", _REFUSED, "the draws would begin anew", unless="`temperature` is 0", allows=_is_greedy),
    ContinuedField("stop", _REFUSED, "a stop string may lie across the seam", ("", [])),
    ContinuedField("bad_words", _REFUSED, "a word may lie across the seam", ([],)),
    *(ContinuedField(name, _REFUSED, "several choices share one stream", (1,)) for name in ("n", "best_of")),
    ContinuedField("use_beam_search", _REFUSED, "the beams are not known", (False,)),
    ContinuedField("echo", _REFUSED, "the text begins with the prompt", (False,)),
    ContinuedField("suffix", _REFUSED, "the text ends with another one", ("",)),
    ContinuedField("logprobs", _REFUSED, _SCORES, (False,)),
    ContinuedField("top_logprobs", _REFUSED, _SCORES, (0,)),
    ContinuedField("prompt_logprobs", _REFUSED, _SCORES),
    ContinuedField("return_tokens_as_token_ids", _LEFT_OUT, "names tokens of log probabilities"),
    ContinuedField("response_format", _REFUSED, _GRAMMAR, ({"type": "text"},)),
    *(
        ContinuedField(name, _REFUSED, _GRAMMAR)
        for name in (
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("regex", "ebnf", "json_schema"),
        )
    ),
    ContinuedField(
        "tools",
        _REFUSED,
        "a continuation is text, which no parser of calls reads",
        ([],),
        "`tool_choice` is `none`",
        _are_unused,
    ),
    ContinuedField("tool_choice", _REFUSED, "as `tools`", ("none", "auto")),
    ContinuedField("functions", _REFUSED, "as `tools`", ([],)),
    ContinuedField("function_call", _REFUSED, "as `tools`", ("none", "auto")),
    ContinuedField("parallel_tool_calls", _LEFT_OUT, "no effect without tools"),
    ContinuedField("thinking_token_budget", _REFUSED, "counts the tokens of the reasoning", (-1,)),
    ContinuedField("include_reasoning", _LEFT_OUT, "no effect on an answer without reasoning"),
    *(
        ContinuedField(name, _COPIED, _BOOKKEEPING)
        for name in (
            *("user", "priority", "service_class", "cache_salt", "session_id", "prompt_cache_key"),
            *("service_tier", "safety_identifier", "metadata", "store"),
        )
    ),
    ContinuedField("request_id", _LEFT_OUT, "the client keeps the first answer's id"),
    ContinuedField("return_token_ids", _LEFT_OUT, "the router asks for ids itself"),
)
_BY_NAME = {field.name: field for field in CONTINUED_FIELDS}
_COPIED_NAMES = {field.name for field in CONTINUED_FIELDS if field.treatment is InContinuation.COPIED}
OTHER_FIELD = "another field"


def obstacle(body: Values) -> str:
    """Return the name of the first field that makes a stream not resumable; empty if it is resumable.

    A field outside the table may have any effect, so it is an obstacle unless it is null.

    Raises:
        msgspec.DecodeError: A value is not JSON.
    """
    for name, raw in body.items():
        field = _BY_NAME.get(name)
        if field is None:
            if bytes(raw) != b"null":
                return OTHER_FIELD
        elif not field.is_harmless(body):
            return name
    return ""


def copied(body: Values) -> dict[str, msgspec.Raw]:
    """Return the fields that a continuation has unchanged."""
    return {name: body[name] for name in body if name in _COPIED_NAMES}


def continued_fields_table() -> str:
    """Return the Markdown table of all fields, a row for each group with one treatment and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for field in CONTINUED_FIELDS:
        groups.setdefault((field.condition, field.why), []).append(f"`{field.name}`")
    lines = ["| field | in the continuation | why |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {condition} | {why} |" for (condition, why), names in groups.items()]
    return "\n".join(lines)


COMPLETION_PATH = "/v1/completions"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of completions, which engines keep. That of a chat is the context.
_MAX_FIELDS = 256

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _CountedFields(msgspec.Struct):
    """Fields that count tokens, and those that say what the client reads."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    stream_options: dict[str, bool | None] | None = None


class _StreamField(msgspec.Struct):
    stream: bool | None = None


_decode_streamed = msgspec.json.Decoder(_StreamField).decode
_decode_limits = msgspec.json.Decoder(_CountedFields).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableRequest:
    """A request whose stream another engine can continue exactly.

    Attributes:
        path: Path of the request.
        body: Body for an engine that begins the answer; it asks for token ids.
        model: Model that the body names.
        wants_ids: Whether the client wants the token ids.
        wants_usage: Whether the client wants a last chunk with the usage.
    """

    path: str
    body: bytes
    model: str | None
    wants_ids: bool
    wants_usage: bool
    _fields: Values
    _max_tokens: int | None
    _min_tokens: int
    _context: int | None

    @property
    def is_chat(self) -> bool:
        """Whether the stream has the chunks of a chat."""
        return self.path == CHAT_PATH

    def num_left(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many tokens may follow the first `num_tokens` of the answer."""
        room = [self._max_tokens, None if self._context is None else self._context - num_prompt_tokens]
        return min(each for each in room if each is not None) - num_tokens

    def continuation(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> bytes:
        """Return the body of the completion that continues the answer behind `answer_ids`."""
        num_tokens = len(answer_ids)
        counted: dict[str, object] = {
            "prompt": [*prompt_ids, *answer_ids],
            "max_tokens": self.num_left(len(prompt_ids), num_tokens),
            "return_token_ids": True,
        }
        if self._min_tokens > num_tokens:
            counted["min_tokens"] = self._min_tokens - num_tokens
        return msgspec.json.encode(copied(self._fields) | counted)


def resumable(path: str, body: bytes, context_of: Callable[[str | None], int | None]) -> ResumableRequest | str | None:
    """Return the request in resumable form, or the obstacle to that; None for a request without a stream.

    An unreadable body counts as one without a stream: the engine refuses it.

    Args:
        path: Path of the request.
        body: Body, unpacked.
        context_of: Returns the longest sequence of a model, tokens; None means unknown.
    """
    try:
        if _decode_streamed(body).stream is not True:
            return None
        fields, limits = _decode(body), _decode_limits(body)
        found = _obstacle(path, fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    context, most = context_of(limits.model), limits.max_completion_tokens
    if most is None:
        most = limits.max_tokens
    if most is None and path == COMPLETION_PATH:
        most = DEFAULT_COMPLETION_TOKENS
    if most is None and context is None:
        found = found or "max_tokens"
    options = limits.stream_options or {}
    return found or ResumableRequest(
        path=path,
        body=msgspec.json.encode(fields | {"return_token_ids": True}),
        model=limits.model,
        wants_ids=bool(limits.return_token_ids),
        wants_usage=bool(options.get("include_usage")),
        _fields=fields,
        _max_tokens=most,
        _min_tokens=limits.min_tokens or 0,
        _context=context,
    )


def _obstacle(path: str, fields: Values) -> str:
    if path not in (COMPLETION_PATH, CHAT_PATH):
        return "path"
    return "number of fields" if len(fields) > _MAX_FIELDS else obstacle(fields)
