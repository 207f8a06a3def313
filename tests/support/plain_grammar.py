"""The plain twin of grammars: one token at a time, by partial matches of Python's `regex`.

The vocabulary has a token for each letter of `LETTERS`, some tokens of several letters, and end tokens. Where only one
text can follow, llguidance allows its usual tokens alone, so no pattern forces letters that one token could join.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import regex

from moestro.core.request import Grammar, SamplingParams
from moestro.grammar.backend import MaskBackend, WaitAllowance
from moestro.grammar.compiler import VocabularySource

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
ENDS = (0, 1)
# conftest.py removes it: the processes of pytest-xdist end without what `atexit` would do.
DIRECTORIES = tempfile.TemporaryDirectory(prefix="plain-grammar-")
BACKENDS: list[MaskBackend] = []  # conftest.py closes them
PATTERNS = ["(ab?|cd)*e", "[a-m]{2,5}", "a*", "x|yz|yzab|0123", "([a-c]{1,3}[0-9]?){1,4}", "(a|b)*abc"]


@cache
def token_texts(vocabulary: int) -> list[str | None]:
    """Text of each token; None for end tokens, "" for tokens without a text."""
    texts = [None, None, *LETTERS, "ab", "yz", "abc", "01"]
    return (texts + [""] * vocabulary)[:vocabulary]


@cache
def tokenizer_directory(vocabulary: int) -> Path:
    """A directory with the tokenizer.json of the vocabulary."""
    names = {"<end>": 0, "<stop>": 1} | {text: i for i, text in enumerate(token_texts(vocabulary)) if text}
    added = [
        {"id": i, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name, i in (("<end>", 0), ("<stop>", 1))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": names, "merges": []}
    directory = Path(DIRECTORIES.name) / str(vocabulary)
    directory.mkdir()
    content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level}
    (directory / "tokenizer.json").write_text(json.dumps(content | {"model": model}))
    return directory


class Patience(WaitAllowance):
    """Waits for each mask, so that no busy machine makes it late."""

    def left_s(self) -> float:
        return 20.0

    def spend(self, waited_ns: int) -> None:
        assert waited_ns < 19e9, "a mask never came"


@cache
def backend(vocabulary: int) -> MaskBackend:
    """The real backend for the vocabulary, shared by all tests of a process."""
    BACKENDS.append(MaskBackend(VocabularySource(tokenizer_directory(vocabulary), vocabulary, ENDS), Patience()))
    return BACKENDS[-1]


def light(pattern: str) -> Grammar:
    """The grammar of a regular expression whose masks a rank may wait for."""
    return Grammar("regex", pattern, is_light=True)


def allowed(generated: list[int], sampling: SamplingParams, vocabulary: int) -> np.ndarray:
    """bool[vocabulary], tokens that may follow, by the definition."""
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "regex", "the twin knows nothing else"
    texts, pattern = token_texts(vocabulary), sampling.grammar.text
    if any(texts[token] is None for token in generated):
        return np.ones(vocabulary, bool)  # the text is complete, and its end was passed
    text = "".join(texts[token] or "" for token in generated)
    found = np.array([_may_follow(pattern, text, own) for own in texts])
    if len(generated) < sampling.min_tokens:
        unwanted = np.isin(np.arange(vocabulary), sampling.stop_token_ids)
        found = found & ~unwanted if (found & ~unwanted).any() else found
    return found


def _may_follow(pattern: str, text: str, own: str | None) -> bool:
    if own is None:
        return regex.fullmatch(pattern, text) is not None
    return bool(own) and regex.fullmatch(pattern, text + own, partial=True) is not None


def random_grammar(rng: np.random.Generator) -> dict[str, object]:
    """A grammar, for some requests. It excludes the wishes that could leave no token at all."""
    if rng.random() < 0.6:
        return {}
    return {
        "grammar": Grammar("regex", str(rng.choice(PATTERNS)), is_light=True),
        "allowed_tokens": b"",
        "bad_words": (),
    }
