"""Messages to and from the processes that compile grammars and compute masks, and the bounds of those processes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moestro.core.grammar import Grammar

_MIB = 1 << 20


class VocabularyMessage(msgspec.Struct, frozen=True):
    """Vocabulary for which a host compiles; the fields of `VocabularySource`."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckAnswer(msgspec.Struct, frozen=True):
    """Result of a check: why the grammar cannot be used; None means that it can."""

    error: str | None


class MaskJob(msgspec.Struct, frozen=True, array_like=True):
    """One mask to compute.

    Attributes:
        matcher: number of the answer's matcher.
        token_ids: int32, packed, tokens of the answer that the process has not read.
        grammar: grammar of the answer, whose matcher the process begins anew. None means that it has one.
    """

    matcher: int
    token_ids: bytes
    grammar: Grammar | None


class LaneWork(msgspec.Struct, frozen=True, array_like=True):
    """Masks to compute in order, after the matchers in `dropped` are forgotten."""

    jobs: list[MaskJob]
    dropped: list[int]


class MaskAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Result of a job.

    Attributes:
        matcher: as in the job; -1 means that the process holds enough and leaves, and no job failed.
        words: int32[words], packed, the mask. It is empty after a failure.
        failure: why the grammar allows no token any more; None means that it does.
        cpu_ns: processor time of the job.
    """

    matcher: int
    words: bytes = b""
    failure: str | None = None
    cpu_ns: int = 0


LEAVING = -1
BEGUN = b""  # first message of a process: what ends it later is its job, and not the end of the host


@dataclass(frozen=True, slots=True)
class ProcessBounds:
    """Bounds of a process that runs clients' grammars.

    Attributes:
        cpu_s: processor time of one job; the kernel ends the process after it.
        memory_bytes: address space beyond that with the vocabulary; an allocation beyond it ends the process.
        kept_bytes: resident memory beyond that with the vocabulary, at which another process replaces this one.
        niceness: as in nice(1).
    """

    cpu_s: float
    memory_bytes: int
    kept_bytes: int
    niceness: int


# A grammar that compiles within the time of TRY, its first mask included, is light: its masks are computed beside those
# of other light ones. Ordinary grammars take 1 to 15 ms.
TRY, CHECK, QUICK, SLOW = "try", "check", "quick", "slow"
BOUNDS = {
    TRY: ProcessBounds(0.03, 256 * _MIB, 0, 10),  # a flood of tries takes a tenth of a core from a step
    CHECK: ProcessBounds(2.0, 1024 * _MIB, 0, 19),
    QUICK: ProcessBounds(0.25, 512 * _MIB, 192 * _MIB, 0),
    # It compiles and computes a mask in one job, for which CHECK has the same time together.
    SLOW: ProcessBounds(4.0, 1280 * _MIB, 512 * _MIB, 19),
}
ROLES = tuple(BOUNDS)  # the wire has their index
# Time until a check, or one mask of a slow grammar, is done. Their processes give way to all others, so that on a
# machine whose processors are full they might wait for ever.
LONGEST_WAIT_S = 60.0


def excess(role: str) -> str:
    """Say that a grammar exceeded the bounds of a role."""
    bounds = BOUNDS[role]
    return f"it takes more than {bounds.cpu_s:g} s or {bounds.memory_bytes // _MIB} MiB to compile"
