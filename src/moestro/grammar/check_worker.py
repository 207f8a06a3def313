"""Check of one grammar, in a process that is forked for it: no check leaves anything to the next."""

from __future__ import annotations

import signal

import msgspec
import numpy as np

from moestro.core.grammar import Grammar
from moestro.grammar.compiler import GrammarCompiler, GrammarError, failure_of
from moestro.grammar.host_messages import CheckAnswer, ProcessBounds
from moestro.text.chats.render_job import read_message, write_message


def check_one(file: int, compiler: GrammarCompiler | GrammarError, bounds: ProcessBounds) -> None:
    """Read a grammar from the socket `file`, and answer whether it can be used."""
    body = read_message(file)
    if body is None:
        return
    grammar = msgspec.msgpack.decode(body, type=Grammar)
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
    error = _error_of(grammar, compiler)
    signal.setitimer(signal.ITIMER_PROF, 0)
    write_message(file, msgspec.msgpack.encode(CheckAnswer(error)))


def _error_of(grammar: Grammar, compiler: GrammarCompiler | GrammarError) -> str | None:
    """Compile the grammar and compute its first mask, which finds grammars that match no text."""
    if isinstance(compiler, GrammarError):
        return str(compiler)
    try:
        matcher = compiler.compile(grammar)
    except GrammarError as error:
        return str(error)
    words = np.zeros(-(-compiler.num_tokens // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return failure_of(matcher)
