"""Parses one answer of a chat: reasoning first, then calls in what is left."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from moestro.text.parsing.output_parser import (
    AnswerPart,
    CallArguments,
    CallEnd,
    CallStart,
    ContentText,
    OutputParser,
    ReasoningParser,
    ReasoningText,
    ToolParser,
)

# Finds stop strings, wherever token borders fall.

_KEPT_TABLES = 256  # stop strings whose tables are kept for further choices of the same request; some kB each


class StopFinder:
    """Passes text on until one of `stops` is complete, and holds back a possible beginning of one.

    The stop that completes first wins; of two that complete together, the longer. The result equals a search after
    every character, so the split of the text into pieces makes no difference. Each character is looked at a bounded
    number of times for each stop, whatever the stops are.

    Args:
        stops: non-empty strings; without any, all text passes at once.
        keeps_stop: whether the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._searches = [_StopSearch(stop) for stop in stops]
        self._keeps_stop = keeps_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, look: bool = True) -> str:
        """Return the part of the held-back text and `text` that can be shown; "" once `found` is set.

        Args:
            look: whether a stop may end in `text`; one may begin there in any case.
        """
        if not self._searches:
            return text
        if self.found is not None:
            return ""
        ends = [(end, search.stop) for search in self._searches if (end := search.feed(text, look=look))]
        num_held, self._held = len(self._held), self._held + text
        if ends:
            end, self.found = min(ends, key=_first_and_longest)
            end += num_held
            shown, self._held = self._held[: end if self._keeps_stop else end - len(self.found)], ""
            return shown
        certain = len(self._held) - max(search.num_matched for search in self._searches)
        shown, self._held = self._held[:certain], self._held[certain:]
        return shown

    def completes(self, early: str, late: str) -> bool:
        """Return whether a stop would end in `late`, if `early` and then `late` came next; nothing is taken."""
        return any(search.would_end(early, late) for search in self._searches)

    def flush(self) -> str:
        """Return the held-back text at the end of a stretch of text, within which alone a stop may lie."""
        shown, self._held = self._held, ""
        for search in self._searches:
            search.num_matched = 0
        return shown


class _StopSearch:
    """Search for one stop in text that comes in pieces: Knuth, Morris and Pratt's.

    Attributes:
        num_matched: length of the longest end of the text with which the stop may begin.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def feed(self, text: str, *, look: bool) -> int:
        """Return the index in `text` behind the first complete stop; 0 if there is none.

        Args:
            look: as for `StopFinder.push`.
        """
        stop, borders, matched, at = self.stop, self._borders, self.num_matched, 0
        while at < len(text):
            if not matched:  # most text
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            while matched and stop[matched] != char:
                matched = borders[matched]
            matched += stop[matched] == char
            at += 1
            if matched == len(stop):
                if look:
                    return at
                matched = borders[matched]
        self.num_matched = matched
        return 0

    def would_end(self, early: str, late: str) -> bool:
        """Return whether the stop would end in `late`, behind `early`."""
        before = self.num_matched
        self.feed(early, look=False)
        ends = self.feed(late, look=True) > 0
        self.num_matched = before
        return ends


def _first_and_longest(found: tuple[int, str]) -> tuple[int, int]:
    end, stop = found
    return end, -len(stop)


@lru_cache(_KEPT_TABLES)
def _borders(stop: str) -> tuple[int, ...]:
    """For each n, the length of the longest proper beginning of stop[:n] that is also its end; 0 for n = 0."""
    borders = [0, 0]
    for char in stop[1:]:
        border = borders[-1]
        while border and stop[border] != char:
            border = borders[border]
        borders.append(border + (stop[border] == char))
    return tuple(borders)


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
