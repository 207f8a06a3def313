"""Contract of the parsers of reasoning and of tool calls.

`feed` takes the answer's text in pieces of any size, `finish` its end, and both return the parts that have become
certain. The parts join to the same answer for every split of the text. Text that may begin a marker is held back until
it is certain, and text that is no call after all becomes content: a parser never raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError
from moestro.text.json_text import ObjectText
from moestro.text.parsing.parser_input import BrokenCallError, Markers, ParserInput, Steps

# Parts of a chat's answer: what a client gets as content, as reasoning, and as calls of tools.


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the reasoning before the message."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of the next call. `id` is the model's own; an empty one means that the server makes one."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next piece of the arguments of the last call. The pieces of a complete call join to a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """End of the last call, which is complete."""


AnswerPart = ContentText | ReasoningText | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as parsers and grammars need it.

    Attributes:
        parameters: JSON schema of the arguments; empty means that the client gave none.
    """

    name: str
    parameters: dict[str, Any]


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
        self._has_begun = False  # whether the text of the present `or_content` has a call
        self._drops_space = False  # whether white space at this place belongs to the format
        self._run = self._all_steps()

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain after the next piece of the answer."""
        self._input.push(text)
        next(self._run, None)
        return self._given()

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the answer.

        Args:
            is_cut: Whether a limit ended the answer. A tag that it cut is dropped.
        """
        self._input.end(is_cut=is_cut)
        next(self._run, None)
        if self._space:  # no call followed
            self._parts.append(self._text_part(self._space))
            self._space = ""
        return self._given()

    @property
    def num_waiting(self) -> int:
        """Characters of the answer whose kind is not certain yet."""
        return self._input.num_waiting

    @property
    def held_space(self) -> str:
        """White space of the present kind that is dropped if a call follows."""
        return self._space

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

    def or_content(self, call: Steps[None], marker: str = "", *, shows_cut: bool = False) -> Steps[bool]:
        """Parse a call; if it breaks before its name is known, `marker` is content, and what follows is parsed anew.

        A marker with which the answer ends is dropped, and so is the beginning of a call that a limit cut.

        Args:
            shows_cut: Whether such a beginning is content instead, because it may well be no call.

        Returns:
            Whether the call is complete.
        """
        self._input.record()
        self._has_begun = False
        try:
            yield from call
        except BrokenCallError:
            if not self._input.is_recording:
                if not self._input.has_ended:  # Else it is cut, and stays open.
                    self.end_call()
            elif self._input.has_ended and not (self._input.has_text and (shows_cut or not self._input.was_cut)):
                self._input.forget()
                self._new_part()
            else:
                self._input.restore()
                if not self._has_begun:
                    self.show(marker)
            return False
        self._input.forget()
        self.end_call()
        return True

    def end_call(self) -> None:  # noqa: B027 - only parsers of calls have one
        """End the call, if one is open."""

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
        ENDS_WITH_ANSWER: Whether a call needs no mark of its end where the answer ends.
        ID_CHARS: Length of the ids that the server makes for calls. None means the length of OpenAI's.
        SEPARATES_REASONING: Whether the format marks the reasoning itself, so that no other parser comes before.
    """

    STARTS: ClassVar[tuple[str, ...]] = ()
    ENDS_WITH_ANSWER: ClassVar[bool] = False
    ID_CHARS: ClassVar[int | None] = None
    SEPARATES_REASONING: ClassVar[bool] = False

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self._arguments: ObjectText | None = None  # of the open call

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the answer. A call that is not complete stays open."""
        parts = super().finish(is_cut=is_cut)
        may_end = self.ENDS_WITH_ANSWER and not is_cut
        if (given := self._arguments) is not None and (given.is_complete or (may_end and not given.is_open)):
            self.end_call()
        return parts + self._given()

    # --- for subclasses

    def lists_of_calls(self, starts: Markers, calls: Callable[[], Steps[None]]) -> Steps[None]:
        """Parse content and lists of calls in turn: a list at the start of the answer, and behind each of `starts`."""
        yield from self._input.skip_space()
        if (yield from self._input.next_char()) == "[":
            yield from self.or_content(calls(), shows_cut=True)
        while marker := (yield from self._input.until(starts, self.show)):
            yield from self.or_content(calls(), marker)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Start a call, which can no longer become content.

        Raises:
            BrokenCallError: No tool of the request has this name.
        """
        if name.strip() not in self.tools:
            raise BrokenCallError
        self.end_call()
        self._input.forget()
        self._has_begun = True
        self._new_part()
        self._arguments = ObjectText()
        self._parts.append(CallStart(name.strip(), call_id))

    def add_arguments(self, text: str) -> None:
        """Add a piece to the arguments of the last call."""
        if self._arguments is not None and (shown := self._arguments.feed(text)):
            self._parts.append(CallArguments(shown))

    def end_call(self) -> None:
        """End the call, if one is open: its arguments become a complete object."""
        if self._arguments is None:
            return
        if rest := self._arguments.close():
            self._parts.append(CallArguments(rest))
        self._parts.append(CallEnd())
        self._arguments = None

    @property
    def may_be_content(self) -> bool:
        """Whether the call that is parsed may still turn out to be content."""
        return self._arguments is None


class ReasoningParser(OutputParser):
    """Base of the parsers of reasoning, whose content goes through the parser of tool calls.

    Args:
        prompt: Rendered prompt, which may have opened or closed the reasoning already.
        continued: Text of the message that the answer continues. None means that the answer is a new message.
        new_calls: Maker of the parser of calls. A call ends reasoning without an end of its own; None means that none
            does.
    """

    def __init__(
        self, prompt: str, continued: str | None = None, new_calls: Callable[[], ToolParser] | None = None
    ) -> None:
        super().__init__()
        self.prompt = prompt
        self.continued = continued
        self.new_calls = new_calls

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


# The parsers by name, and the choice of one: by an operator's flag, else by the model's chat template.

ParserT = TypeVar("ParserT", bound=OutputParser)

NO_PARSER = "none"  # Value of both flags that turns a parser off.

TOOL_PARSERS: PolicyKind[type[ToolParser]] = PolicyKind(
    "tool call parser", "--tool-call-parser", "moestro.text.formats"
)
REASONING_PARSERS: PolicyKind[type[ReasoningParser]] = PolicyKind(
    "reasoning parser", "--reasoning-parser", "moestro.text.formats"
)


@dataclass(frozen=True, slots=True)
class ChosenParser(Generic[ParserT]):
    """The parser of one kind for a model.

    Attributes:
        name: Registered name; `none` without a parser.
        parser: None means that the text is not parsed.
        reason: What decided, for the banner.
    """

    name: str
    parser: type[ParserT] | None
    reason: str


def check_parser(kind: PolicyKind[type[ParserT]], name: str | None) -> None:
    """Check the value of a parser's flag.

    Raises:
        ConfigError: No parser of the kind has this name.
    """
    if name in (None, NO_PARSER):
        return
    try:
        kind.make(name)
    except ConfigError as error:
        raise ConfigError(f"{error}; leave {kind.flag} out, and the chat template decides") from None


def choose_parser(kind: PolicyKind[type[ParserT]], name: str | None, template: str) -> ChosenParser[ParserT]:
    """Return the parser that the operator named, else the one whose format the chat template asks for.

    Of several formats the one with the most strings in the template wins: formats extend each other's markers.

    Args:
        name: Value of the kind's flag; None means that the template decides.
        template: Text of the model's chat templates; empty without any.
    """
    if name == NO_PARSER:
        return ChosenParser(NO_PARSER, None, f"{kind.flag} {NO_PARSER}")
    if name is not None:
        return ChosenParser(name, kind.make(name), kind.flag)
    found = {each: kind.make(each) for each in kind.names()}
    matching = [
        each for each, parser in found.items() if parser.TEMPLATE and all(map(template.__contains__, parser.TEMPLATE))
    ]
    if not matching:
        return ChosenParser(NO_PARSER, None, "the chat template asks for no known format")
    best = max(matching, key=lambda each: len(found[each].TEMPLATE))
    markers = " ".join(found[best].TEMPLATE)
    return ChosenParser(best, found[best], f"the chat template has {markers}")
