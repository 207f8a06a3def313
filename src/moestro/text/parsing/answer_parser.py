"""Parses one answer of a chat: reasoning first, then calls in what is left."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moestro.text.parsing.answer_parts import AnswerPart, CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from moestro.text.parsing.output_parser import OutputParser, ReasoningParser, ToolParser
from moestro.text.parsing.stop_strings import StopFinder

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
        stops: Finder of stop strings, which end the answer where its content has one. None means that there are none.
        shows_reasoning: Whether the client wants the reasoning.
        is_parallel: Whether the answer may have more than one call; later ones are dropped otherwise.
        reports_calls: Whether an answer with calls ends for the reason `tool_calls`.

    Attributes:
        num_calls: Number of calls so far.
        is_within_call: Whether the last call is not complete.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: ToolParser | None,
        stops: StopFinder | None = None,
        *,
        shows_reasoning: bool = True,
        is_parallel: bool = True,
        reports_calls: bool = True,
    ) -> None:
        self.num_calls = 0
        self.is_within_call = False
        self._stops = StopFinder(()) if stops is None else stops
        self._reasoning = reasoning
        self._calls = calls
        self._shows_reasoning = shows_reasoning
        self._is_parallel = is_parallel
        self._reports_calls = reports_calls
        # Characters of the answer in which no stop may end, and all until the first part behind them; 0: no longer.
        self._num_early = self._num_fed = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return any(parser is not None and parser.is_reasoning for parser in (self._reasoning, self._calls))

    def feed(self, text: str, *, may_stop: bool = True) -> list[ChatPart]:
        """Return the parts that are certain after the next piece of the answer.

        Args:
            may_stop: Whether a stop string may end in `text`. Once it may, it always may.
        """
        if not may_stop:
            self._num_early = self._num_fed = self._num_fed + len(text)
            return self._numbered(self._parsed(text))
        if not self._num_early:
            return self._numbered(self._parsed(text)) + self._stop_in_space()
        found: list[ChatPart] = []
        for i, char in enumerate(text):  # One at a time, so that the end of each part in the answer is known.
            self._num_fed += 1
            parts = self._parsed(char)
            found += self._numbered(parts) + self._stop_in_space()
            if parts and self._num_certain >= self._num_early:
                self._num_early = self._num_fed = 0  # All that follows lies behind.
                return found + self.feed(text[i + 1 :])
        return found

    def finish(self, *, is_cut: bool = False) -> list[ChatPart]:
        """Return the remaining parts at the end of the answer.

        Args:
            is_cut: Whether a limit ended the answer, and not the model.
        """
        parts: list[AnswerPart] = []
        if is_cut:  # What waits is dropped.
            self._num_fed -= sum(each.num_waiting for each in self._parsers)
        if self._reasoning is not None:
            parts += self._parsed_calls(self._reasoning.finish(is_cut=is_cut))
        if self._calls is not None:
            parts += self._calls.finish(is_cut=is_cut)
        return self._numbered(parts) + self._held_content()

    def finish_reason(self, reason: str) -> str:
        """Return the reason that the client gets for the end of the answer. A cut answer keeps its own."""
        has_called = bool(self.num_calls) and not self.is_within_call
        return "tool_calls" if has_called and reason == "stop" and self._reports_calls else reason

    @property
    def _num_certain(self) -> int:
        """Characters of the answer up to the end of the last certain part; valid while there are early ones."""
        return self._num_fed - sum(each.num_waiting + len(each.held_space) for each in self._parsers)

    @property
    def _parsers(self) -> list[OutputParser]:
        return [each for each in (self._calls, self._reasoning) if each is not None]

    def _split(self, text: str, end: int) -> tuple[str, str]:
        """Divide text that ends at `end` in the answer into that in which no stop may end, and the rest."""
        at = len(text) - max(0, min(len(text), end - self._num_early)) if self._num_early else 0
        return text[:at], text[at:]

    def _pushed(self, text: str) -> str:
        """Return the content that can be shown after `text`."""
        if not self._num_early:
            return self._stops.push(text)
        early, late = self._split(text, self._num_certain)
        shown = self._stops.push(early, look=False) if early else ""
        return shown + (self._stops.push(late) if late else "")

    def _held_space(self) -> str:
        """Return white space of the content that parsers hold back, because a call may follow it directly."""
        space = ""
        for parser in self._parsers:  # Text passes the later one first.
            space += "" if parser.is_reasoning else parser.held_space
            if parser.num_waiting:
                break
        return space

    def _stop_in_space(self) -> list[ChatPart]:
        """Return the content before a stop that ends in white space which a parser holds back, without waiting on."""
        space = self._held_space()
        early, late = self._split(space, self._num_certain + len(space))
        if not late or self._stops.found is not None or not self._stops.completes(early, late):
            return []
        shown = self._stops.push(early, look=False) + self._stops.push(late)
        return [ContentText(shown)] if shown else []

    def _parsed(self, text: str) -> list[AnswerPart]:
        if self._reasoning is None:
            return self._parsed_calls([ContentText(text)])
        return self._parsed_calls(self._reasoning.feed(text))

    def _parsed_calls(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        if self._calls is None:
            return list(parts)
        found: list[AnswerPart] = []
        for part in parts:
            found += self._calls.feed(part.text) if isinstance(part, ContentText) else [part]
        return found

    def _numbered(self, parts: Iterable[AnswerPart]) -> list[ChatPart]:
        """Return the parts as the client gets them, up to a stop string."""
        numbered: list[ChatPart] = []
        for part in parts:
            if self._stops.found is not None:
                break
            if isinstance(part, ContentText):
                if text := self._pushed(part.text):
                    numbered.append(ContentText(text))
                continue
            numbered += self._held_content()
            if isinstance(part, ReasoningText):
                if part.text and self._shows_reasoning:
                    numbered.append(part)
            elif (delta := self._call_delta(part)) is not None:
                numbered.append(delta)
        return numbered

    def _call_delta(self, part: CallStart | CallArguments | CallEnd) -> CallDelta | None:
        """Count a part of a call. Returns None for its end, and for calls that the request does not want."""
        if isinstance(part, CallStart):
            self.num_calls += 1
        if self.num_calls > 1 and not self._is_parallel:
            return None
        self.is_within_call = not isinstance(part, CallEnd)
        match part:
            case CallStart():
                return CallDelta(self.num_calls - 1, part.id or self._new_id(), part.name)
            case CallArguments():
                return CallDelta(self.num_calls - 1, arguments=part.text)
        return None

    def _held_content(self) -> list[ChatPart]:
        """Return content that might have begun a stop string, but for what follows it."""
        held = self._stops.flush()
        return [ContentText(held)] if held else []

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
