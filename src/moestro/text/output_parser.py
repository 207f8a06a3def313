"""Contract of the parsers of reasoning and of tool calls.

`feed` takes the answer's text in pieces of any size, `finish` its end, and both return the parts that have become
certain. The parts join to the same answer for every split of the text. Text that may begin a marker is held back until
it is certain, and text that is no call after all becomes content: a parser never raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import ClassVar

from moestro.text.answer_parts import AnswerPart, CallArguments, CallStart, ContentText, ReasoningText, ToolSpec
from moestro.text.parser_input import BrokenCallError, ParserInput, Steps

SPACE_LIMIT = 64  # characters of white space that count as framing before a marker


class OutputParser(ABC):
    """Base of the parsers: runs `steps`, and frames the text.

    White space between two parts belongs to the format and not to the text, so it is dropped before and after a call
    or the reasoning.

    Attributes:
        MARKERS: Strings of the format. Special tokens with these texts are kept in the text that is parsed.
        TEMPLATE: Strings that all occur in a chat template that asks for this format. Empty means that no template
            selects the parser.
    """

    MARKERS: ClassVar[tuple[str, ...]] = ()
    TEMPLATE: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.is_reasoning = False
        self._input = ParserInput()
        self._parts: list[AnswerPart] = []
        self._space = ""  # held back; dropped if a call follows
        self._joint = ""
        self._drops_space = False  # whether white space at this place belongs to the format
        self._run = self._all_steps()

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after the next piece of the answer."""
        self._input.push(text)
        next(self._run, None)
        return self._given()

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts at the end of the answer."""
        self._input.has_ended = True
        next(self._run, None)
        if self._space:  # no call followed
            self._parts.append(self._text_part(self._space))
        return self._given()

    @abstractmethod
    def steps(self) -> Steps[None]:
        """Parse the answer; what is left of it when the steps end is content."""

    # --- for subclasses

    def show(self, text: str) -> None:
        """Add text of the current kind, reasoning or content."""
        if self._drops_space:
            text = text.lstrip()
            if not text:
                return
            self._drops_space = False
            text = self._joint + text
        text = self._space + text
        kept = text.rstrip()
        certain = max(len(kept), len(text) - SPACE_LIMIT)
        self._space = text[certain:]
        if certain:
            self._parts.append(self._text_part(text[:certain]))

    def begin_text(self, *, is_reasoning: bool, joint: str = "") -> None:
        """Show what follows as reasoning or as content. `joint` precedes the first character that is no space."""
        self._new_part()
        self._joint = joint
        self.is_reasoning = is_reasoning

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Start a call, which can no longer become content.

        Raises:
            BrokenCallError: The name is empty.
        """
        if not name.strip():
            raise BrokenCallError
        self._input.forget()
        self._new_part()
        self._parts.append(CallStart(name.strip(), call_id))

    def add_arguments(self, text: str) -> None:
        """Add a piece to the arguments of the last call."""
        if text:
            self._parts.append(CallArguments(text))

    def or_content(self, call: Steps[None], marker: str = "") -> Steps[bool]:
        """Parse a call; if it breaks before its name is known, its text, with `marker` before it, is content.

        A marker with which the answer ends is dropped.

        Returns:
            Whether the call is complete.
        """
        self._input.record()
        try:
            yield from call
        except BrokenCallError:
            text = self._input.recorded()
            if text is not None and self._input.has_ended and not text.strip():
                self._new_part()
            elif text is not None:
                self.show(marker + text)
            return False
        self._input.forget()
        return True

    @property
    def may_be_content(self) -> bool:
        """Whether the call that is parsed may still turn out to be content."""
        return self._input.is_recording

    # --- running

    def _all_steps(self) -> Steps[None]:
        with suppress(BrokenCallError):  # a parser's mistake must not end the stream
            yield from self.steps()
        while (yield from self._input.next_char()):
            self.show(self._input.all_at_hand())

    def _given(self) -> list[AnswerPart]:
        given, self._parts = self._parts, []
        return given

    def _new_part(self) -> None:
        self._space, self._joint, self._drops_space = "", "", True

    def _text_part(self, text: str) -> AnswerPart:
        return ReasoningText(text) if self.is_reasoning else ContentText(text)


class ToolParser(OutputParser):
    """Base of the parsers of tool calls.

    Args:
        tools: Tools of the request. Formats without types convert arguments by their schemas.

    Attributes:
        STARTS: Markers with which a call begins; reasoning without an end ends there too.
        ID_CHARS: Length of the ids that the server makes for calls. None means the length of OpenAI's.
        SEPARATES_REASONING: Whether the format marks the reasoning itself, so that no other parser comes before.
    """

    STARTS: ClassVar[tuple[str, ...]] = ()
    ID_CHARS: ClassVar[int | None] = None
    SEPARATES_REASONING: ClassVar[bool] = False

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}


class ReasoningParser(OutputParser):
    """Base of the parsers of reasoning, whose content goes through the parser of tool calls.

    Args:
        prompt: Rendered prompt, which may have opened or closed the reasoning already.
        continued: Text of the message that the answer continues. None means that the answer is a new message.
        call_starts: Markers that end reasoning without an end of its own.
    """

    def __init__(self, prompt: str, continued: str | None = None, call_starts: Sequence[str] = ()) -> None:
        super().__init__()
        self.prompt = prompt
        self.continued = continued
        self.call_starts = tuple(call_starts)

    @classmethod
    def end_tag(cls) -> str | None:
        """Return the text that ends the reasoning; None means that no text ends it everywhere."""
        return None

    def thought(self, special: Container[str]) -> str:
        """Return the rule `thought` of a grammar for what precedes a limited answer; "" means nothing.

        Args:
            special: Texts of the vocabulary's special tokens, which a grammar spells differently.
        """
        return ""
