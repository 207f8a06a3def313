"""Parts of a chat's answer: what a client gets as content, as reasoning, and as calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
