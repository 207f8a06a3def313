"""How a model's chats are read: which tools its answers may call, and where its reasoning ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from moestro.core.request import Grammar
from moestro.errors import RequestError
from moestro.text.parsing.answer_grammars import after_thought, harmony_call, named_call, required_calls
from moestro.text.parsing.answer_parser import AnswerParser, StopFinder
from moestro.text.parsing.call_readers import JsonCallReader
from moestro.text.parsing.output_parser import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ChosenParser,
    ReasoningParser,
    ToolParser,
    ToolSpec,
    choose_parser,
)
from moestro.text.parsing.parser_input import Steps
from moestro.text.settings import ChatSettings


class RequiredCallsParser(ToolParser):
    """Parses `[{"name": ..., "parameters": {...}}, ...]`."""

    def steps(self) -> Steps[None]:
        """Parse the list."""
        yield from self._input.skip_space()
        yield from self.or_content(JsonCallReader(self, self._input).array())


class NamedCallParser(ToolParser):
    """Parses an answer that is nothing but the arguments of the only tool in `tools`."""

    def steps(self) -> Steps[None]:
        """Pass the answer on as arguments."""
        yield from self._input.skip_space()
        if (yield from self._input.next_char()):
            self.begin_call(next(iter(self.tools)))
        while (yield from self._input.next_char()):
            self.add_arguments(self._input.all_at_hand())


logger = logging.getLogger(__name__)

HARMONY = "gpt-oss"
_HARMONY_NAMES = {HARMONY, "openai", "openai_gptoss"}  # the last two are vLLM's
ToolChoice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Use of tools that a request allows.

    Attributes:
        tools: Tools that may be called; of a named choice, the only one.
        is_parallel: Whether one answer may have several calls.
    """

    choice: ToolChoice = "none"
    tools: tuple[ToolSpec, ...] = ()
    is_parallel: bool = True


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEnd:
    """End of a rendered chat.

    Attributes:
        continued: Text of the last message, which the answer continues. None means that the answer is a new message.
    """

    prompt: str
    continued: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of the answers to one request.

    Attributes:
        grammar: Grammar of an answer with its reasoning. None means any text.
        markers: Texts of special tokens that the parsers need to see.
    """

    grammar: Grammar | None
    markers: frozenset[str]
    _reasoning: Callable[[], ReasoningParser] | None
    _calls: Callable[[], ToolParser] | None
    _use: ToolUse
    _shows_reasoning: bool

    def parser(self, stops: StopFinder | None = None) -> AnswerParser:
        """Return a new parser, for one answer, which ends at a stop string in its content."""
        return AnswerParser(
            None if self._reasoning is None else self._reasoning(),
            None if self._calls is None else self._calls(),
            stops,
            shows_reasoning=self._shows_reasoning,
            is_parallel=self._use.is_parallel,
            reports_calls=self._use.choice != "named",  # OpenAI reports "stop" then, and so does vLLM
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Formats of a model's answers, as its chat template or the operator chose them.

    Attributes:
        calls: Parser of calls. None means that the format is unknown: calls by the model's choice stay text, and forced
            calls are JSON.
        reasoning: Parser of reasoning. None means that all text is content.
        allows_auto: Whether the model may decide to call tools.
        shows_unused_tools: Whether the prompt has the tools that a request forbids.
        variables: Default variables of the chat template.
        trusts_templates: Whether a request may bring its own chat template.
        special: Texts of the vocabulary's special tokens.
        choices: Name and reason of each parser's choice, for the banner.
    """

    calls: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    allows_auto: bool = True
    shows_unused_tools: bool = True
    variables: dict[str, Any] = field(default_factory=dict)
    trusts_templates: bool = False
    special: frozenset[str] = frozenset()
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def reasoning_end(self) -> str | None:
        """The tag that ends the reasoning. None means that no tag does, or that the model does not reason."""
        return None if self.reasoning is None else self.reasoning.end_tag()

    def check(self, use: ToolUse) -> None:
        """Refuse a choice of tools that this server cannot honour.

        Raises:
            RequestError: The model may not decide by itself.
        """
        if use.choice == "auto" and not self.allows_auto:
            raise RequestError(
                'tool_choice "auto" is off on this server (--no-enable-auto-tool-choice). Send "required", "none" or a'
                " named tool, or leave tools out.",
                param="tool_choice",
                code="unsupported_parameter",
            )

    def answers(
        self, use: ToolUse, end: ChatEnd, grammar: Grammar | None = None, *, shows_reasoning: bool = True
    ) -> AnswerFormat | None:
        """Return the format of the answers to one request; None means any text, which is content.

        Args:
            grammar: Grammar that the request asks for.
            shows_reasoning: Whether the client wants the reasoning.
        """
        calls, reasoning = self._calls(use), self._reasoning(use)
        if calls is None and reasoning is None and grammar is None:
            return None
        new_calls = None if calls is None else partial(calls, use.tools)
        ending = new_calls if use.choice == "auto" else None
        new_reasoning = None if reasoning is None else partial(reasoning, end.prompt, end.continued, ending)
        markers = {marker for parser in (calls, reasoning) if parser is not None for marker in parser.MARKERS}
        wanted = self._grammar(use, "" if new_reasoning is None else new_reasoning().thought(self.special), grammar)
        return AnswerFormat(wanted, frozenset(markers), new_reasoning, new_calls, use, shows_reasoning)

    @property
    def _is_whole(self) -> bool:
        """Whether one parser reads calls and reasoning."""
        return self.calls is not None and self.calls.SEPARATES_REASONING

    def _calls(self, use: ToolUse) -> type[ToolParser] | None:
        if use.choice == "none":
            return None
        if use.choice == "auto" or self._is_whole:
            return self.calls
        return RequiredCallsParser if use.choice == "required" else NamedCallParser

    def _reasoning(self, use: ToolUse) -> type[ReasoningParser] | None:
        return None if self._is_whole and use.choice != "none" else self.reasoning

    def _grammar(self, use: ToolUse, thought: str, wanted: Grammar | None) -> Grammar | None:
        if use.choice in ("none", "auto"):
            return None if wanted is None else after_thought(wanted, thought)
        if self._is_whole:
            return harmony_call(use.tools)
        if use.choice == "required":
            return required_calls(use.tools, is_parallel=use.is_parallel, thought=thought)
        return named_call(use.tools[0], thought)


def chat_format(settings: ChatSettings, template: str = "", special: frozenset[str] = frozenset()) -> ChatFormat:
    """Return the formats that the operator or the chat template chose.

    Args:
        template: Text of the model's chat templates.
        special: Texts of the vocabulary's special tokens.
    """
    calls = choose_parser(TOOL_PARSERS, settings.tool_call_parser, template)
    if calls.parser is None and settings.tool_call_parser is None and "tools" in template:
        logger.warning(
            "the chat template takes tools and asks for no known format of calls, so calls stay text;"
            " --tool-call-parser names a format: %s",
            ", ".join(TOOL_PARSERS.names()),
        )
    reasoning = choose_parser(REASONING_PARSERS, settings.reasoning_parser, template)
    if not _HARMONY_NAMES.isdisjoint({calls.name, reasoning.name}):  # Either one says what the format is.
        calls = ChosenParser(HARMONY, TOOL_PARSERS.make(HARMONY), calls.reason)
        reasoning = ChosenParser(HARMONY, REASONING_PARSERS.make(HARMONY), reasoning.reason)
    return ChatFormat(
        calls=calls.parser,
        reasoning=reasoning.parser,
        allows_auto=settings.enable_auto_tool_choice,
        shows_unused_tools=not settings.exclude_tools_when_tool_choice_none,
        variables=settings.template_variables(),
        trusts_templates=settings.trust_request_chat_template,
        special=special,
        choices=((calls.name, calls.reason), (reasoning.name, reasoning.reason)),
    )
