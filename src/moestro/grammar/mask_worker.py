"""Computes masks in a forked process, one after the other, for the rank at the other end of a socket."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moestro.core.grammar import Grammar
from moestro.grammar.compiler import GrammarCompiler, GrammarError, failure_of
from moestro.grammar.host_messages import LEAVING, LaneWork, MaskAnswer, MaskJob, ProcessBounds
from moestro.text.chats.render_job import read_message, write_message

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LaneWork).decode


def compute_masks(file: int, compiler: GrammarCompiler | GrammarError, bounds: ProcessBounds) -> None:
    """Serve the socket `file` until it ends, or until this process holds more than it may keep.

    A replacement costs little, because the rank sends what is needed again; and only the end of a process gives all of
    its memory back.
    """
    matchers = MatcherTable(compiler)
    most = _resident_bytes() + bounds.kept_bytes
    while (body := read_message(file)) is not None:
        work = _decode(body)
        matchers.forget(work.dropped)
        for job in work.jobs:
            signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
            answer = matchers.answer(job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_message(file, _encode(answer))
        if _resident_bytes() > most:
            write_message(file, _encode(MaskAnswer(LEAVING)))
            return


class MatcherTable:
    """Matchers of answers by number, and the compiled grammars from which they are copied.

    Args:
        compiler: compiles grammars, or the reason why none can be compiled.
    """

    def __init__(self, compiler: GrammarCompiler | GrammarError) -> None:
        self._compiler = compiler
        self._compiled: dict[Grammar, Any] = {}  # as long as this process lives: its memory is bounded
        self._matchers: dict[int, Any] = {}

    def forget(self, matchers: list[int]) -> None:
        """Drop the matchers of answers that have ended."""
        for number in matchers:
            self._matchers.pop(number, None)

    def answer(self, job: MaskJob) -> MaskAnswer:
        """Return the mask after the job's tokens."""
        began_ns = time.process_time_ns()
        try:
            words = self._mask(job)
        except GrammarError as error:
            return MaskAnswer(job.matcher, failure=str(error))
        except BaseException as error:  # a panic of the library is no Exception
            return MaskAnswer(job.matcher, failure=f"internal error: {type(error).__name__}")
        return MaskAnswer(job.matcher, words, cpu_ns=time.process_time_ns() - began_ns)

    def _mask(self, job: MaskJob) -> bytes:
        if isinstance(self._compiler, GrammarError):
            raise self._compiler
        if job.grammar is not None:
            self._matchers[job.matcher] = self._start(self._compiler, job.grammar).deep_copy()
        matcher = self._matchers[job.matcher]
        for token in np.frombuffer(job.token_ids, np.int32).tolist():
            if not matcher.consume_token(token):
                break
        words = np.zeros(-(-self._compiler.num_tokens // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        failure = failure_of(matcher)
        if failure is not None:
            raise GrammarError(failure)
        return words.tobytes()

    def _start(self, compiler: GrammarCompiler, grammar: Grammar) -> Any:
        """Return a matcher at the start of `grammar`. One that does not compile is not kept."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = compiler.compile(grammar)
        return compiled


def _resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
