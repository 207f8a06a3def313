"""Grammars that answers have to follow, and the interface of what computes their token masks.

A mask is a function of the grammar and of the answer's tokens so far, like all changes to logits. Neither the batch,
nor a chunk, nor a preemption, nor another engine changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "choice", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """Language to which the text of an answer is limited. Only an end token can follow a complete text.

    Attributes:
        kind: one of `GRAMMAR_KINDS`.
        text: the JSON schema, the regular expression, a JSON list of strings, or a grammar in Lark's notation or in
            EBNF. The text of a `json_object` is empty.
        is_light: whether a check has found that it compiles in milliseconds. It changes where masks are computed, and
            no mask; equal grammars may differ in it.
    """

    kind: str
    text: str = ""
    is_light: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ValueError(f"the kind of a grammar must be one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """Request for the mask of the next token of one sequence.

    Attributes:
        matcher: what `GrammarBackend.matcher` returned for the sequence.
        generated: int32[n], all tokens of the answer so far.
        unwanted: int32[m], tokens that are excluded as long as the grammar allows others: stop tokens before
            `min_tokens`.
    """

    matcher: Any
    generated: NDArray[np.int32]
    unwanted: NDArray[np.int32]


class TokenMask(Protocol):
    """Mask of one row of logits, computed beside the step."""

    def words(self) -> NDArray[np.int32] | None:
        """int32[words], bit t % 32 of word t // 32 says whether token t is allowed; the same at each call.

        None means that the mask is not ready: the row gets no token in this step.
        """
        ...


class GrammarBackend(Protocol):
    """Computes the masks of a rank; `grammar.backend` has one."""

    def matcher(self, grammar: Grammar) -> Any:
        """Return the matcher of a new sequence."""
        ...

    def masks(self, requests: Sequence[MaskRequest]) -> Sequence[TokenMask]:
        """Return the masks of a plan's sequences, which are computed while the plan is."""
        ...

    def is_ready(self, matcher: Any) -> bool:
        """Whether the mask that was requested last is computed, or no mask is being computed."""
        ...

    def failure(self, matcher: Any) -> str | None:
        """Return why a matcher allows no token any more; None means that it works."""
        ...
