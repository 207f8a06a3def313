"""Builds the two kinds of response in OpenAI's forms, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from moestro.server.api.answers.logprobs import Score
from moestro.server.api.fields.protocol import (
    Answer,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TextChoice,
    TopLogprob,
    Usage,
)
from moestro.server.api.fields.validation import Options
from moestro.server.engines.piece import Piece
from moestro.text.parsing.answer_parser import merged
from moestro.text.tokenizer_library import TokenText


def chat_message(piece: Piece) -> ChatMessage:
    """Return the message of a complete choice. Its content is null where it has only reasoning or calls."""
    if piece.parts is None:
        return ChatMessage(piece.text)
    delta = merged(piece.parts)
    has_more = bool(delta.reasoning or delta.calls)
    return ChatMessage(
        delta.content or (None if has_more else ""),
        reasoning=delta.reasoning or None,
        reasoning_content=delta.reasoning or None,
        tool_calls=[
            ChatToolCall(CalledFunction(call.arguments, call.name), call.id, "function") for call in delta.calls
        ],
    )


def chat_delta(piece: Piece) -> ChatDelta:
    """Return the addition of one piece. As in vLLM, a token without any text yet has empty content."""
    delta = None if piece.parts is None else merged(piece.parts)
    content = piece.text if delta is None else delta.content
    shown: str | UnsetType
    if not content and (piece.finish_reason is not None or (delta is not None and (delta.reasoning or delta.calls))):
        shown = UNSET
    else:
        shown = content
    if delta is None:
        return ChatDelta(content=shown)
    calls = [
        ChatToolCall(CalledFunction(call.arguments, call.name), call.id, "function" if call.id else None, call.index)
        for call in delta.calls
    ]
    return ChatDelta(
        content=shown,
        reasoning=delta.reasoning or None,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every chunk of a response repeats."""

    answer_id: str
    created: int  # Seconds since 1970.
    model: str
    fingerprint: str


class AnswerForm(Protocol):
    """Builds the response bodies of one kind of completion."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """Return the complete response."""
        ...

    def openings(self, first: Piece | None) -> Sequence[Answer]:
        """Return the chunks that precede any text.

        Args:
            first: First piece, of which `chunk` returns the rest; None means that there is none.
        """
        ...

    def chunk(self, piece: Piece) -> Answer:
        """Return the chunk for a new piece of one choice."""
        ...

    def closing(self, usage: Usage) -> Answer:
        """Return the last chunk, with the usage and no choices."""
        ...


class CompletionForm:
    """Builds responses of type `text_completion`."""

    def __init__(self, heading: Heading, options: Options) -> None:
        self._heading = heading
        self._options = options

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """Return the complete response."""
        answer = _answer(self._heading, "text_completion", [self._choice(piece) for piece in choices], usage)
        answer.service_tier = answer.kv_transfer_params = None
        return answer

    def openings(self, first: Piece | None) -> Sequence[Answer]:
        """Return no chunks, because a completion begins with its text."""
        return ()

    def chunk(self, piece: Piece) -> Answer:
        """Return the chunk for a new piece of one choice."""
        return _answer(self._heading, "text_completion", [self._choice(piece)], None)

    def closing(self, usage: Usage) -> Answer:
        """Return the last chunk, with the usage and no choices."""
        return _answer(self._heading, "text_completion", [], usage)

    def _choice(self, piece: Piece) -> TextChoice:
        choice = TextChoice(piece.index, piece.text, piece.finish_reason, stop_reason=piece.stop_reason)
        if piece.scores is not None:
            choice.logprobs = _completion_logprobs(piece.scores, self._options)
            if piece.token_ids is not None:
                num_top, is_ranked = self._options.logprobs or 0, not self._options.logprob_token_ids
                choice.logprobs.by_token_id = _logprobs_by_id(piece.scores, num_top, is_ranked=is_ranked)
        if piece.prompt_scores is not None:
            choice.prompt_logprobs = _logprobs_by_id(piece.prompt_scores, self._options.prompt_logprobs or 0)
        choice.token_ids = _ids(piece.token_ids)
        choice.prompt_token_ids = _ids(piece.prompt_token_ids)
        return choice


class ChatForm:
    """Builds responses of types `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, heading: Heading, options: Options) -> None:
        self._heading = heading
        self._options = options

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Answer:
        """Return the complete response."""
        messages = [
            ChatChoice(
                piece.index,
                chat_message(piece),
                piece.finish_reason,
                _chat_logprobs(piece.scores, self._options),
                piece.stop_reason,
                _ids(piece.token_ids),
            )
            for piece in choices
        ]
        answer = _answer(self._heading, "chat.completion", messages, usage)
        answer.service_tier = answer.prompt_logprobs = answer.prompt_token_ids = answer.kv_transfer_params = None
        if choices[0].prompt_scores is not None:
            answer.prompt_logprobs = _logprobs_by_id(choices[0].prompt_scores, self._options.prompt_logprobs or 0)
        if choices[0].prompt_token_ids is not None:
            answer.prompt_token_ids = list(choices[0].prompt_token_ids)
        return answer

    def openings(self, first: Piece | None) -> Sequence[Answer]:
        """Return one chunk with the role for each choice; as in vLLM, the first has the tokens of the prompt."""
        delta = ChatDelta(role="assistant", content="")
        chunks = [self._chunk([ChatChunkChoice(index, delta, None)]) for index in range(self._options.n)]
        if first is not None and first.prompt_token_ids is not None:
            chunks[0].prompt_token_ids = list(first.prompt_token_ids)
        return chunks

    def chunk(self, piece: Piece) -> Answer:
        """Return the chunk for a new piece of one choice."""
        choice = ChatChunkChoice(
            piece.index,
            chat_delta(piece),
            piece.finish_reason,
            _chat_logprobs(piece.scores, self._options),
            piece.stop_reason,
            _ids(piece.token_ids),
        )
        return self._chunk([choice])

    def closing(self, usage: Usage) -> Answer:
        """Return the last chunk, with the usage and no choices."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> Answer:
        return _answer(self._heading, "chat.completion.chunk", choices, usage)


def _ids(token_ids: Sequence[int] | None) -> list[int] | None:
    return None if token_ids is None else list(token_ids)


def heading(answer_id: str, model: str, fingerprint: str) -> Heading:
    """Return the heading of a response that is created now."""
    return Heading(answer_id, int(time.time()), model, fingerprint)


def _name(token_id: int, token: TokenText, options: Options) -> str:
    """Return what a token is called in log probabilities: its text, or, as in vLLM, its id."""
    return f"token_id:{token_id}" if options.names_tokens_by_id else token.text


def _completion_logprobs(scores: Sequence[Score], options: Options) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_name(score.token_id, score.token, options) for score in scores],
        token_logprobs=[score.logprob for score in scores],
        top_logprobs=[_by_name(score, options) for score in scores],
        text_offset=[score.offset for score in scores],
    )


def _by_name(score: Score, options: Options) -> dict[str, float] | None:
    """Return log probabilities by name, always with the token itself. Equal texts keep the most likely token."""
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for alternative in score.top[: options.logprobs or 0]:
        found.setdefault(_name(alternative.token_id, alternative.token, options), alternative.logprob)
    found.setdefault(_name(score.token_id, score.token, options), score.logprob)
    return found


def _chat_logprobs(scores: Sequence[Score] | None, options: Options) -> ChatLogprobs | None:
    return None if scores is None else ChatLogprobs([_chat_logprob(score, options) for score in scores])


def _chat_logprob(score: Score, options: Options) -> ChatLogprob:
    assert score.logprob is not None, "a chat shows no prompt"
    top = [
        TopLogprob(_name(other.token_id, other.token, options), other.logprob, list(other.token.raw))
        for other in score.top
    ]
    return ChatLogprob(_name(score.token_id, score.token, options), score.logprob, list(score.token.raw), top)


def _logprobs_by_id(scores: Sequence[Score], num_top: int, *, is_ranked: bool = True) -> PromptLogprobs:
    return [_by_id(score, num_top, is_ranked=is_ranked) for score in scores]


def _by_id(score: Score, num_top: int, *, is_ranked: bool) -> dict[str, PromptLogprob] | None:
    """Return log probabilities by token id in vLLM's order: the token itself, then its alternatives.

    Args:
        is_ranked: Whether the alternatives are the most likely tokens.
    """
    if score.logprob is None:
        return None
    found = {str(score.token_id): PromptLogprob(score.logprob, score.rank, score.token.text)}
    for rank, (token_id, token, logprob) in enumerate(score.top[:num_top], 1):
        found.setdefault(str(token_id), PromptLogprob(logprob, rank if is_ranked else None, token.text))
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
        usage=msgspec.UNSET if usage is None else usage,
    )
