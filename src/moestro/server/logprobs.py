"""Log probabilities on their way from token ids to an answer."""

from __future__ import annotations

from typing import NamedTuple

from moestro.core.request import TokenLogprobs
from moestro.text.token_text import TokenText, TokenTexts

_LEAST = -9999.0  # what stands for minus infinity, which JSON lacks, in OpenAI's API


class Alternative(NamedTuple):
    """A token that could have come."""

    token_id: int
    token: TokenText
    logprob: float


class Score(NamedTuple):
    """One token of an answer or a prompt.

    Attributes:
        offset: where its text begins, in characters.
        logprob, rank: of the raw distribution, rank 1 the likeliest; None for a prompt's first token, which nothing
            foretells.
        top: the likeliest, the likeliest first.
    """

    token_id: int
    token: TokenText
    offset: int
    logprob: float | None
    rank: int
    top: tuple[Alternative, ...]


def score_of(entry: TokenLogprobs, offset: int, texts: TokenTexts) -> Score:
    """The score of one token."""
    top = tuple(Alternative(token_id, texts[token_id], max(logprob, _LEAST)) for token_id, logprob in entry.top)
    return Score(entry.token_id, texts[entry.token_id], offset, max(entry.logprob, _LEAST), entry.rank, top)


def first_score(token_id: int, texts: TokenTexts) -> Score:
    """That of a prompt's first token."""
    return Score(token_id, texts[token_id], 0, None, 0, ())
