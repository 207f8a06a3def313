"""The host: `python -m moestro.grammar.host_process`. It loads a vocabulary and forks; it runs no grammar itself.

It loads no torch, and has one thread, because a fork copies no other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moestro.core.request import Grammar
from moestro.grammar.compiler import GrammarCompiler, GrammarError, VocabularySource, failure_of
from moestro.grammar.host import (
    BEGUN,
    BOUNDS,
    LEAVING,
    QUICK,
    ROLES,
    SLOW,
    TRY,
    CheckAnswer,
    LaneWork,
    MaskAnswer,
    MaskJob,
    ProcessBounds,
    VocabularyMessage,
)
from moestro.text.child_process import limit_memory, read_message, write_message

# Computes masks in a forked process, one after the other, for the rank at the other end of a socket.

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
        if self._compiler.text_ends and not matcher.is_accepting():
            for end in self._compiler.text_ends:
                words.view(np.uint32)[end // 32] &= ~np.uint32(1 << end % 32)
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


_MOST_LIKELY_KILLED = "1000"  # of /proc/self/oom_score_adj, if the machine's memory is used up


def main() -> None:
    """Fork until stdin, the socket to the parent process, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the socket ends this process
    _yield_to_other_sessions()
    with socket.socket(fileno=os.dup(0)) as control:
        body = read_message(control.fileno())
        if body is None:
            return
        compiler = _load(msgspec.msgpack.decode(body, type=VocabularyMessage))
        gc.freeze()  # a collection in a fork would copy the pages of all objects
        forks = Forks()
        while True:
            found, files, _, _ = socket.recv_fds(control, 1, 1)
            if not found:
                forks.end()
                return
            (file,) = files
            if forks.fork() == 0:
                control.close()
                _run(ROLES[found[0]], file, compiler)
            os.close(file)


class Forks:
    """Children of this process, which are reaped when they end."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def fork(self) -> int:
        """Fork. Returns 0 in the child."""
        pid = os.fork()
        if pid:
            self._pids.add(pid)
            self._reap()  # it may have ended before it was added
        return pid

    def end(self) -> None:
        """End all children; they may be in the middle of a job, which is of no use any more."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # no process id becomes free before it is signalled
        self._reap()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _reap(self) -> None:
        for pid in list(self._pids):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._pids.discard(pid)


def _yield_to_other_sessions() -> None:
    """Lower the priority of this process's session, if it is the first in it.

    Where the kernel gives each session an equal share (autogroup, sched(7)), nice(1) acts within the session alone.
    """
    with contextlib.suppress(OSError):  # not Linux, or built without autogroup
        if os.getsid(0) == os.getpid():
            Path("/proc/self/autogroup").write_text(str(BOUNDS[TRY].niceness))


def _load(source: VocabularyMessage) -> GrammarCompiler | GrammarError:
    """Return the compiler, or why there is none, which each fork answers then."""
    try:
        return GrammarCompiler(VocabularySource(Path(source.tokenizer), source.vocab_size, source.eos_token_ids))
    except GrammarError as error:
        return error


def _run(role: str, file: int, compiler: GrammarCompiler | GrammarError) -> None:
    """Be a process of `role`, and leave."""
    try:
        _bound(BOUNDS[role])
        write_message(file, BEGUN)
        with contextlib.suppress(OSError):  # the parent has left
            if role in (QUICK, SLOW):
                compute_masks(file, compiler, BOUNDS[role])
            else:
                check_one(file, compiler, BOUNDS[role])
    finally:
        os._exit(0)  # the interpreter would take milliseconds to clear what the kernel clears anyway


def _bound(bounds: ProcessBounds) -> None:
    """Let the kernel hold the bounds, and no library write a client's bytes into the log."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer ends the process, whatever it is doing
    limit_memory(bounds.memory_bytes)
    os.nice(bounds.niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_MOST_LIKELY_KILLED)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a panic of the library prints parts of the grammar
        os.dup2(nothing, stream)


if __name__ == "__main__":
    main()
