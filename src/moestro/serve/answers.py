"""The two kinds of answer in OpenAI's forms, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moestro.serve.generation import Piece
from moestro.serve.protocol import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    TextChoice,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of an answer repeats."""

    answer_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str


class AnswerForm(Protocol):
    """How one kind of answer is spelt."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """All at once."""
        ...

    def opening(self) -> Answer | None:
        """A chunk before any text, if this kind has one."""
        ...

    def chunk(self, piece: Piece) -> Answer:
        """What one choice gained."""
        ...

    def closing(self, usage: Usage) -> Answer:
        """The last chunk: the usage, and no choices."""
        ...


class CompletionForm:
    """`text_completion`."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """All at once."""
        return _answer(self._heading, "text_completion", [_text_choice(piece) for piece in choices], usage)

    def opening(self) -> None:
        """A completion begins with its text."""

    def chunk(self, piece: Piece) -> Answer:
        """What one choice gained."""
        return _answer(self._heading, "text_completion", [_text_choice(piece)], None)

    def closing(self, usage: Usage) -> Answer:
        """The last chunk."""
        return _answer(self._heading, "text_completion", [], usage)


class ChatForm:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """All at once."""
        messages = [ChatChoice(piece.index, ChatMessage(piece.text), piece.finish_reason) for piece in choices]
        return _answer(self._heading, "chat.completion", messages, usage)

    def opening(self) -> Answer:
        """The role comes first, alone."""
        return self._chunk([ChatChunkChoice(0, ChatDelta(role="assistant", content=""), None)])

    def chunk(self, piece: Piece) -> Answer:
        """What the message gained."""
        return self._chunk([ChatChunkChoice(piece.index, ChatDelta(content=piece.text or None), piece.finish_reason)])

    def closing(self, usage: Usage) -> Answer:
        """The last chunk."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> Answer:
        return _answer(self._heading, "chat.completion.chunk", choices, usage)


def heading(answer_id: str, model: str, fingerprint: str) -> Heading:
    """A heading dated now."""
    return Heading(answer_id, int(time.time()), model, fingerprint)


def _text_choice(piece: Piece) -> TextChoice:
    return TextChoice(piece.index, piece.text, piece.finish_reason)


def _answer(
    head: Heading,
    kind: str,
    choices: list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice],
    usage: Usage | None,
) -> Answer:
    return Answer(
        id=head.answer_id,
        object=kind,
        created=head.created,
        model=head.model,
        choices=choices,
        system_fingerprint=head.fingerprint,
        usage=usage,
    )
