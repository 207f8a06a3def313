"""The parsers by name, and the choice of one: by an operator's flag, else by the model's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError
from moestro.text.parsing.output_parser import OutputParser, ReasoningParser, ToolParser

ParserT = TypeVar("ParserT", bound=OutputParser)

NO_PARSER = "none"  # Value of both flags that turns a parser off.

TOOL_PARSERS: PolicyKind[type[ToolParser]] = PolicyKind(
    "tool call parser", "--tool-call-parser", "moestro.text.tool_parsers"
)
REASONING_PARSERS: PolicyKind[type[ReasoningParser]] = PolicyKind(
    "reasoning parser", "--reasoning-parser", "moestro.text.reasoning_parsers"
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
