"""Compiles grammars for one tokenizer, within limits of memory and of the work of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from moestro.core.request import Grammar
from moestro.errors import MoestroError

# A line break and the indentation of fifteen levels by two. Without a limit, a model may write spaces for ever.
MAX_JSON_SPACES = 32
_JSON_SPACE = rf"[ \n\r\t]{{0,{MAX_JSON_SPACES}}}"
# llguidance's figures: a state of the lexer takes 1 to 2 kB, so that one answer takes 100 MB at most.
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SYMBOLS = 200_000
# Work for one mask, which takes some 15 ms and 3 ms at these defaults of llguidance.
STEP_LEXER_FUEL, STEP_MAX_ITEMS = 200_000, 50_000
_ERROR_CHARS = 500


class GrammarError(MoestroError):
    """A grammar does not compile, or allows no text; the message says why."""


@dataclass(frozen=True, slots=True)
class VocabularySource:
    """What a compiler needs to know of a model.

    Attributes:
        tokenizer: directory with tokenizer.json.
        vocab_size: number of columns of the model's logits.
        eos_token_ids: tokens that end an answer.
    """

    tokenizer: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compiles grammars for the vocabulary of `source`. Safe to call from several threads.

    Attributes:
        num_tokens: tokens that a mask covers, at least the model's.
        text_ends: tokens that end an answer although they have a text, which a grammar may allow in the middle.

    Raises:
        GrammarError: llguidance cannot read the tokenizer.
    """

    def __init__(self, source: VocabularySource) -> None:
        try:
            tokenizer = _read_tokenizer(source)
        except Exception as error:  # the library raises bare exceptions
            raise GrammarError(f"this model's tokenizer cannot be used for grammars: {_short(str(error))}") from error
        self._tokenizer = tokenizer
        self.num_tokens: int = tokenizer.vocab_size
        self.text_ends = tuple(each for each in source.eos_token_ids if not tokenizer.is_special_token(each))

    def compile(self, grammar: Grammar) -> Any:
        """Return an `LLMatcher` at the start of `grammar`. Other threads run meanwhile.

        Raises:
            GrammarError: the grammar is invalid or too large.
        """
        try:
            definition = _definition(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_short(str(error))) from error
        limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            step_lexer_fuel=STEP_LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, definition, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        return matcher


def _read_tokenizer(source: VocabularySource) -> LLTokenizer:
    text = (source.tokenizer / "tokenizer.json").read_text()
    ends = list(source.eos_token_ids) or None
    try:
        return LLTokenizer(text, n_vocab=source.vocab_size, eos_token=ends)
    except ValueError:  # a tokenizer may have more tokens than the model, or lack one of its ends
        num_known = LLTokenizer(text).vocab_size
        text = _with_tokens(text, num_known, max(source.eos_token_ids, default=-1) + 1)
        return LLTokenizer(text, n_vocab=max(num_known, source.vocab_size), eos_token=ends)


def _with_tokens(text: str, num_known: int, num_wanted: int) -> str:
    """Add tokens without text to a tokenizer.json of `num_known` tokens, up to `num_wanted`.

    Such tokens are only in other files of the checkpoint, or have no name at all.
    """
    if num_wanted <= num_known:
        return text
    fields = msgspec.json.decode(text, type=dict[str, Any])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": n, "content": f"<|moestro_{n}|>", "special": True, **flags} for n in range(num_known, num_wanted)]
    return msgspec.json.encode({**fields, "added_tokens": [*(fields.get("added_tokens") or ()), *added]}).decode()


def failure_of(matcher: Any) -> str | None:
    """Return the error of an `LLMatcher` in one line; None means that it has none."""
    if not matcher.is_error():
        return None
    text = matcher.get_error()
    return "no text matches it" if text.startswith("NoExtension") else _short(text.split("<non-verbose/>")[0])


def _short(text: str) -> str:
    """Return the line of an error that says what is wrong; the others repeat the grammar."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(iter(named or lines), "")[:_ERROR_CHARS]


def _definition(grammar: Grammar) -> str:
    """Write `grammar` in llguidance's form."""
    match grammar.kind:
        case "json_object":
            return _json_definition('{"type": "object"}')
        case "json_schema":
            return _json_definition(grammar.text)
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "choice":
            return _choice_definition(msgspec.json.decode(grammar.text, type=list[str]))
    return str(grammar_from("grammar", grammar.text))


def _json_definition(schema: str) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_SPACE}))


def _choice_definition(choices: Sequence[str]) -> str:
    texts = " | ".join(msgspec.json.encode(choice).decode() for choice in choices)
    return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
