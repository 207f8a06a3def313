"""Tokens of a streamed answer, and how many of them another engine can continue.

A detokenizer sends text only up to a whole character, and one token may end within a character. The router has no
tokenizer, so it continues an answer only behind a chunk after which the engine holds no text back:

1. The chunk has text without a replacement character, and
2. it has one token, or its last token is known to end with a whole character.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_UNFINISHED = "\ufffd"  # A decoder's replacement for bytes that are no character.
_MAX_WHOLE = 1 << 18  # Token ids kept of one model.


@dataclass(slots=True)
class ModelTraits:
    """What the streams of one model have shown.

    Attributes:
        parses_reasoning: Whether engines have sent reasoning apart from content, so that their chats are no raw text.
        whole: Ids of tokens that end with a whole character.
    """

    parses_reasoning: bool = False
    whole: set[int] = field(default_factory=set)

    def learn_whole(self, token_id: int) -> None:
        """Keep a token that ends with a whole character."""
        if len(self.whole) < _MAX_WHOLE:
            self.whole.add(token_id)


class AnswerTokens:
    """Tokens of one answer, from all of its engines.

    Attributes:
        prompt_ids: Tokens of the prompt; None until an engine has sent them.
        ids: Tokens of the answer that have arrived.
        num_safe: Number of those behind which the answer can be continued.
        num_before: Number of those of earlier engines.
    """

    __slots__ = ("_traits", "ids", "num_before", "num_safe", "prompt_ids")

    def __init__(self, traits: ModelTraits) -> None:
        self._traits = traits
        self.prompt_ids: Sequence[int] | None = None
        self.ids = array("q")
        self.num_safe = self.num_before = 0

    @property
    def is_safe(self) -> bool:
        """Whether the engine has sent all text of all tokens."""
        return self.num_safe == len(self.ids)

    def take(self, new_ids: Sequence[int], text: str, *, is_last: bool) -> None:
        """Add the tokens of a chunk with its text."""
        was_safe = self.is_safe
        self.ids.extend(new_ids)
        if is_last:
            self.num_safe = len(self.ids)
        elif text and new_ids and _UNFINISHED not in text:
            is_single = len(new_ids) == 1
            if is_single and was_safe:
                self._traits.learn_whole(new_ids[0])
            if is_single or new_ids[-1] in self._traits.whole:
                self.num_safe = len(self.ids)

    def cut(self) -> None:
        """Drop the tokens that are not continued; another engine generates them anew."""
        del self.ids[self.num_safe :]
        self.num_before = self.num_safe

    def add_up(self, usage: dict[str, Any]) -> None:
        """Turn the usage of a continuation into that of the whole answer, in place."""
        num_prompt = len(self.prompt_ids or ())
        if not self.num_before or not num_prompt:
            return
        usage |= self._counts(self.num_before + int(usage.get("completion_tokens") or 0))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], num_prompt)

    def usage(self) -> dict[str, int]:
        """Return the usage of the whole answer so far."""
        return self._counts(len(self.ids))

    def _counts(self, num_tokens: int) -> dict[str, int]:
        num_prompt = len(self.prompt_ids or ())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
