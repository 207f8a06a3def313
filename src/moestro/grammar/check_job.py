"""Messages between the API server and the process that checks grammars, and the limits of a check."""

from __future__ import annotations

import msgspec

from moestro.core.grammar import Grammar

TIME_LIMIT_S = 2.0  # for one grammar; ordinary ones take milliseconds, and llguidance's largest up to a second
MEMORY_LIMIT_BYTES = 2 << 30  # address space of the process, which holds the vocabulary twice while it reads it


class CheckJob(msgspec.Struct, frozen=True):
    """One grammar to check, and the vocabulary for which it is compiled."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    grammar: Grammar


class CheckAnswer(msgspec.Struct, frozen=True):
    """Result of a check: why the grammar cannot be used; None means that it can."""

    error: str | None
