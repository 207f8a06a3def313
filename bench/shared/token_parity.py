"""Compares answers token by token by the rule of exactness: near ties are counted, and nothing else may differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Where tokens first differ, the reference's two best logits must be so close: rounding in float32 depends on the shape
# of a batch and moves logits by some 1e-6 (docs/log.md).
NEAR_TIE = 1e-5
# One near tie in so many tokens is allowed; fewer tokens are allowed one.
TOKENS_A_TIE = 10_000
# Largest difference of the log probability of an equal token. A hundred roundings of 1e-6 do not reach it, and one
# expert that was left out or counted twice moves it by far more.
MAX_LOGPROB_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class ScoredAnswer:
    """One greedy answer.

    Attributes:
        tokens: the tokens as text.
        logprobs: log probability of each.
        gaps: difference between the logits of the two best tokens at each place.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


def scored(body: dict[str, Any]) -> ScoredAnswer:
    """Read the body of a completion with `logprobs` of at least 2."""
    found = body["choices"][0]["logprobs"]
    tops = [sorted(top.values(), reverse=True) for top in found["top_logprobs"]]
    # Two tokens with one text would share an entry; their gap then reads as infinite, which only makes the rule harder.
    gaps = tuple(top[0] - top[1] if len(top) > 1 else float("inf") for top in tops)
    return ScoredAnswer(tuple(found["tokens"]), tuple(found["token_logprobs"]), gaps)


@dataclass
class Parity:
    """The comparison of one feature with the reference.

    Attributes:
        feature: name of the feature.
        num_prompts, num_tokens: compared answers, and tokens of the reference until each first difference.
        num_equal: tokens that are equal.
        max_difference: largest difference of the log probability of an equal token.
        near_ties: prompts whose first difference is a near tie, as (prompt, place, gap).
        differences: prompts with another difference, as text.
        why_not: why the feature could not be compared; "" means that it was.
        notes: what happened meanwhile, as text.
    """

    feature: str
    num_prompts: int = 0
    num_tokens: int = 0
    num_equal: int = 0
    max_difference: float = 0.0
    near_ties: list[tuple[int, int, float]] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    why_not: str = ""
    notes: str = ""

    @property
    def holds(self) -> bool:
        """Whether tokens and log probabilities are those of the reference, by the rule."""
        allowed = max(1, self.num_tokens // TOKENS_A_TIE)
        return (
            not self.why_not
            and not self.differences
            and self.num_prompts > 0
            and len(self.near_ties) <= allowed
            and self.max_difference <= MAX_LOGPROB_DIFFERENCE
        )

    def add(self, prompt: int, reference: ScoredAnswer, answer: ScoredAnswer) -> None:
        """Compare one answer with that of the reference."""
        self.num_prompts += 1
        for place, token in enumerate(reference.tokens):
            self.num_tokens += 1
            other = answer.tokens[place] if place < len(answer.tokens) else None
            if other != token:
                gap = reference.gaps[place]
                if other is not None and gap < NEAR_TIE:
                    self.near_ties.append((prompt, place, gap))
                else:
                    text = f"prompt {prompt}, token {place}: {other!r} for {token!r}, whose lead is {gap:.3g}"
                    self.differences.append(text)
                return  # what follows continues another text
            self.num_equal += 1
            difference = abs(reference.logprobs[place] - answer.logprobs[place])
            self.max_difference = max(self.max_difference, difference)
        if len(answer.tokens) != len(reference.tokens):
            self.differences.append(f"prompt {prompt}: {len(answer.tokens)} tokens for {len(reference.tokens)}")
