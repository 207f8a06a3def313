"""Parses one answer of a chat: reasoning first, then calls in what is left."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moestro.text.answer_parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText
from moestro.text.output_parser import ReasoningParser, ToolParser

_OPENAI_ID_CHARS = 24  # after "call_", as OpenAI's ids have
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Addition to call number `index` of an answer; the first one has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


ChatPart = ContentText | ReasoningText | CallDelta


@dataclass(slots=True)
class MessageDelta:
    """Addition to a message, made of the parts of one or more outputs."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerParser:
    """Converts the text of one answer to parts.

    Args:
        reasoning: Parser of the reasoning. None means that there is none, or that `calls` separates it.
        calls: Parser of the calls. None means that the answer may not call tools.
        shows_reasoning: Whether the client wants the reasoning.
        is_parallel: Whether the answer may have more than one call; later ones are dropped otherwise.
        reports_calls: Whether an answer with calls ends for the reason `tool_calls`.

    Attributes:
        num_calls: Number of calls so far.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: ToolParser | None,
        *,
        shows_reasoning: bool = True,
        is_parallel: bool = True,
        reports_calls: bool = True,
    ) -> None:
        self.num_calls = 0
        self._reasoning = reasoning
        self._calls = calls
        self._shows_reasoning = shows_reasoning
        self._is_parallel = is_parallel
        self._reports_calls = reports_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return any(parser is not None and parser.is_reasoning for parser in (self._reasoning, self._calls))

    def feed(self, text: str) -> list[ChatPart]:
        """Return the parts that are certain after the next piece of the answer."""
        if self._reasoning is None:
            return self._numbered(self._parsed_calls([ContentText(text)]))
        return self._numbered(self._parsed_calls(self._reasoning.feed(text)))

    def finish(self) -> list[ChatPart]:
        """Return the remaining parts at the end of the answer."""
        parts: list[AnswerPart] = []
        if self._reasoning is not None:
            parts += self._parsed_calls(self._reasoning.finish())
        if self._calls is not None:
            parts += self._calls.finish()
        return self._numbered(parts)

    def finish_reason(self, reason: str) -> str:
        """Return the reason that the client gets for the end of the answer. A cut answer keeps its own."""
        return "tool_calls" if self.num_calls and reason == "stop" and self._reports_calls else reason

    def _parsed_calls(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        if self._calls is None:
            return list(parts)
        found: list[AnswerPart] = []
        for part in parts:
            found += self._calls.feed(part.text) if isinstance(part, ContentText) else [part]
        return found

    def _numbered(self, parts: Iterable[AnswerPart]) -> list[ChatPart]:
        numbered: list[ChatPart] = []
        for part in parts:
            if isinstance(part, CallStart):
                self.num_calls += 1
                delta = CallDelta(self.num_calls - 1, part.id or self._new_id(), part.name)
            elif isinstance(part, CallArguments):
                delta = CallDelta(self.num_calls - 1, arguments=part.text)
            else:
                if part.text and (self._shows_reasoning or isinstance(part, ContentText)):
                    numbered.append(part)
                continue
            if self._is_parallel or not delta.index:
                numbered.append(delta)
        return numbered

    def _new_id(self) -> str:
        num_chars = None if self._calls is None else self._calls.ID_CHARS
        made = "".join(secrets.choice(_ALPHABET) for _ in range(num_chars or _OPENAI_ID_CHARS))
        return made if num_chars else f"call_{made}"


def merged(parts: Iterable[ChatPart]) -> MessageDelta:
    """Return one addition to a message, with one entry for each call, because some clients expect no two."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallDelta):
            starts.setdefault(part.index, part)
            arguments.setdefault(part.index, []).append(part.arguments)
        else:
            (content if isinstance(part, ContentText) else reasoning).append(part.text)
    calls = [CallDelta(i, call.id, call.name, "".join(arguments[i])) for i, call in sorted(starts.items())]
    return MessageDelta("".join(content), "".join(reasoning), calls)
