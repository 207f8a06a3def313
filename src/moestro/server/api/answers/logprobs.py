"""Log probabilities together with the texts of their tokens."""

from __future__ import annotations

from typing import NamedTuple

from moestro.core.request import TokenLogprobs
from moestro.text.tokenizer_library import TokenText, TokenTexts

_LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks.


class Alternative(NamedTuple):
    """A likely token at one position of a text."""

    token_id: int
    token: TokenText
    logprob: float


class Score(NamedTuple):
    """Log probability of one token of an answer or a prompt.

    Attributes:
        offset: Start of the token's text, in characters.
        logprob, rank: Values in the raw distribution, rank 1 for the most likely token. A prompt's first token has no
            distribution: its logprob is None and its rank 0.
        top: Most likely tokens, the most likely first.
    """

    token_id: int
    token: TokenText
    offset: int
    logprob: float | None
    rank: int
    top: tuple[Alternative, ...]


def score_of(entry: TokenLogprobs, offset: int, texts: TokenTexts) -> Score:
    """Return the score of one token."""
    top = tuple(Alternative(token_id, texts[token_id], max(logprob, _LEAST)) for token_id, logprob in entry.top)
    return Score(entry.token_id, texts[entry.token_id], offset, max(entry.logprob, _LEAST), entry.rank, top)


def first_score(token_id: int, texts: TokenTexts) -> Score:
    """Return the score of a prompt's first token, which has no log probability."""
    return Score(token_id, texts[token_id], 0, None, 0, ())
