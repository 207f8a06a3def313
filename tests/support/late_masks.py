"""A backend whose masks are right and late: a mask is ready when the scheduler has looked for it so many times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.plain_grammar import allowed

from moestro.core.request import Grammar, MaskRequest, SamplingParams


@dataclass(eq=False)
class LateMatcher:
    """One answer: tokens before the mask that was requested last, and the looks until it is ready."""

    grammar: Grammar
    num_requested: int = -1
    num_looks: int = 0


@dataclass(eq=False)
class LateMask:
    matcher: LateMatcher
    request: MaskRequest
    backend: LateMasks

    def words(self) -> np.ndarray | None:
        return self._words

    def __post_init__(self) -> None:
        self._words = self.backend.words_of(self.request) if self.matcher.num_looks == 0 else None
        self.backend.num_late += self._words is None


@dataclass(eq=False)
class LateMasks:
    """Implements `core.request.GrammarBackend`.

    Attributes:
        vocabulary: number of tokens.
        delay: looks until the mask of a grammar is ready, drawn for each mask.
        num_masks, num_late: masks that were computed, and takings of one that was not ready.
    """

    vocabulary: int
    delay: Callable[[Grammar], int]
    num_masks: int = 0
    num_late: int = 0

    def matcher(self, grammar: Grammar) -> LateMatcher:
        return LateMatcher(grammar)

    def masks(self, requests: list[MaskRequest]) -> list[LateMask]:
        for request in requests:
            matcher = request.matcher
            if matcher.num_requested != len(request.generated):
                self.num_masks += 1
                matcher.num_requested, matcher.num_looks = len(request.generated), self.delay(matcher.grammar)
        return [LateMask(request.matcher, request, self) for request in requests]

    def is_ready(self, matcher: LateMatcher) -> bool:
        matcher.num_looks = max(matcher.num_looks - 1, 0)
        return matcher.num_looks == 0

    def failure(self, matcher: LateMatcher) -> str | None:
        return None

    def words_of(self, request: MaskRequest) -> np.ndarray:
        num, unwanted = len(request.generated), tuple(request.unwanted.tolist())
        sampling = SamplingParams(
            max_tokens=num + 1, min_tokens=num + 1, stop_token_ids=unwanted, grammar=request.matcher.grammar
        )
        bits = np.zeros(-(-self.vocabulary // 32) * 32, np.uint8)
        bits[: self.vocabulary] = allowed(request.generated.tolist(), sampling, self.vocabulary)
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
