"""New output of one choice, as text."""

from __future__ import annotations

import msgspec

from moestro.server.api.answers.logprobs import Score
from moestro.text.parsing.answer_parser import ChatPart


class Piece(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice.

    Attributes:
        text: New text; may be empty.
        finish_reason: Reason for the end of the choice; None means that more pieces follow.
        stop_reason: Stop string, or the client's stop token, that ended the choice.
        scores: Scores of the new tokens, shown or not, after those of an echoed prompt; None means not requested.
        prompt_scores: Scores of the prompt's tokens, if `prompt_logprobs` requests them.
        token_ids: New tokens, shown or not; None means not requested.
        prompt_token_ids: Tokens of the prompt, with the first piece of a choice that requests them.
        parts: Parsed parts of a chat's text; None means that all text is content.
    """

    index: int
    text: str
    finish_reason: str | None
    scores: tuple[Score, ...] | None = None
    prompt_scores: tuple[Score, ...] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    parts: tuple[ChatPart, ...] | None = None

    @property
    def has_only_text(self) -> bool:
        """Whether all other fields have their default values."""
        return (
            self.finish_reason is None
            and self.parts is None
            and self.scores is None
            and self.token_ids is None
            and self.stop_reason is None
            and self.prompt_scores is None
            and self.prompt_token_ids is None
        )
