"""The two kinds of answer in OpenAI's forms, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moestro.server.generation import Piece
from moestro.server.logprobs import Score
from moestro.server.protocol import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextChoice,
    TopLogprob,
    Usage,
)
from moestro.server.validation import Options


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

    def openings(self) -> Sequence[Answer]:
        """Chunks before any text, if this kind has some."""
        ...

    def chunk(self, piece: Piece) -> Answer:
        """What one choice gained."""
        ...

    def closing(self, usage: Usage) -> Answer:
        """The last chunk: the usage, and no choices."""
        ...


class CompletionForm:
    """`text_completion`."""

    def __init__(self, heading: Heading, options: Options) -> None:
        self._heading = heading
        self._options = options

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """All at once."""
        return _answer(self._heading, "text_completion", [self._choice(piece) for piece in choices], usage)

    def openings(self) -> Sequence[Answer]:
        """None: a completion begins with its text."""
        return ()

    def chunk(self, piece: Piece) -> Answer:
        """What one choice gained."""
        return _answer(self._heading, "text_completion", [self._choice(piece)], None)

    def closing(self, usage: Usage) -> Answer:
        """The last chunk."""
        return _answer(self._heading, "text_completion", [], usage)

    def _choice(self, piece: Piece) -> TextChoice:
        choice = TextChoice(piece.index, piece.text, piece.finish_reason)
        if piece.scores is not None:
            choice.logprobs = _completion_logprobs(piece.scores, self._options.logprobs or 0)
        if piece.prompt_scores is not None:
            choice.prompt_logprobs = _prompt_logprobs(piece.prompt_scores, self._options.prompt_logprobs or 0)
        return choice


class ChatForm:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, heading: Heading, options: Options) -> None:
        self._heading = heading
        self._options = options

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """All at once."""
        messages = [
            ChatChoice(piece.index, ChatMessage(piece.text), piece.finish_reason, _chat_logprobs(piece.scores))
            for piece in choices
        ]
        answer = _answer(self._heading, "chat.completion", messages, usage)
        if choices[0].prompt_scores is not None:
            answer.prompt_logprobs = _prompt_logprobs(choices[0].prompt_scores, self._options.prompt_logprobs or 0)
        return answer

    def openings(self) -> Sequence[Answer]:
        """The role of each choice comes first, alone."""
        first = ChatDelta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(index, first, None)]) for index in range(self._options.n)]

    def chunk(self, piece: Piece) -> Answer:
        """What the message gained."""
        shows_nothing_more = not piece.text and piece.finish_reason is not None
        delta = ChatDelta(content=None if shows_nothing_more else piece.text)
        return self._chunk([ChatChunkChoice(piece.index, delta, piece.finish_reason, _chat_logprobs(piece.scores))])

    def closing(self, usage: Usage) -> Answer:
        """The last chunk."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> Answer:
        return _answer(self._heading, "chat.completion.chunk", choices, usage)


def heading(answer_id: str, model: str, fingerprint: str) -> Heading:
    """A heading dated now."""
    return Heading(answer_id, int(time.time()), model, fingerprint)


def _completion_logprobs(scores: Sequence[Score], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[score.token.text for score in scores],
        token_logprobs=[score.logprob for score in scores],
        top_logprobs=[_by_text(score, num_top) for score in scores],
        text_offset=[score.offset for score in scores],
    )


def _by_text(score: Score, num_top: int) -> dict[str, float] | None:
    """The likeliest tokens, and the one that came in any case. Of tokens that read alike the likelier one stands."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for alternative in score.top[:num_top]:
        found.setdefault(alternative.token.text, alternative.logprob)
    found.setdefault(score.token.text, score.logprob)
    return found


def _chat_logprobs(scores: Sequence[Score] | None) -> ChatLogprobs | None:
    return None if scores is None else ChatLogprobs([_chat_logprob(score) for score in scores])


def _chat_logprob(score: Score) -> ChatLogprob:
    assert score.logprob is not None, "a chat shows no prompt"
    top = [TopLogprob(other.token.text, other.logprob, list(other.token.raw)) for other in score.top]
    return ChatLogprob(score.token.text, score.logprob, list(score.token.raw), top)


def _prompt_logprobs(scores: Sequence[Score], num_top: int) -> PromptLogprobs:
    return [_by_id(score, num_top) for score in scores]


def _by_id(score: Score, num_top: int) -> dict[str, PromptLogprob] | None:
    """As vLLM has it: the token that came first, then the likeliest."""
    if score.logprob is None:
        return None
    found = {str(score.token_id): PromptLogprob(score.logprob, score.rank, score.token.text)}
    for rank, (token_id, token, logprob) in enumerate(score.top[:num_top], 1):
        found.setdefault(str(token_id), PromptLogprob(logprob, rank, token.text))
    return found


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
