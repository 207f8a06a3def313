"""Fields of a request in its continuation: each is exact on another engine, or the stream is not resumable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

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
