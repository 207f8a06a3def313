"""The host process, of which all processes that run clients' grammars are forks, and the check of a grammar in a fork.

A grammar is a program of the client: a mask may take minutes and exhaust memory, whatever limits its library promises.
So no grammar runs in a process that serves others. The host loads the vocabulary once; each fork of it shares that
memory, starts in milliseconds, and is bounded by the kernel.

A new grammar first gets a short try. Ordinary ones pass it; the others are checked again with more time, one after the
other and with a low priority. So a slow grammar delays an ordinary one by the time of a try.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from threading import BoundedSemaphore, Lock

import msgspec

from moestro.core.request import Grammar
from moestro.grammar.compiler import VocabularySource
from moestro.text.child_process import read_message, write_message

# Messages to and from the processes that compile grammars and compute masks, and the bounds of those processes.

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


_END_S = 3.0  # for the host to end by itself, which takes milliseconds once it has read the vocabulary
_COMMAND = (sys.executable, "-m", "moestro.grammar.host_process")


class GrammarHost:
    """Starts processes for grammars of one vocabulary. Safe to call from several threads.

    A host that was killed is started again by the next call.

    Args:
        source: vocabulary of the model.
        has_own_session: whether signals to the group of this process, such as Ctrl-C, do not reach the processes.
    """

    def __init__(self, source: VocabularySource, *, has_own_session: bool = True) -> None:
        self._source = source
        self._has_own_session = has_own_session
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the host unless it runs; it loads the vocabulary meanwhile."""
        with self._lock:
            self._running()

    def fork(self, role: str) -> socket.socket:
        """Start a process. Returns the socket to it, which ends when the process does.

        Args:
            role: one of `ROLES`.
        """
        own, theirs = socket.socketpair()
        message = [bytes([ROLES.index(role)])]
        with theirs, self._lock:
            try:
                socket.send_fds(self._running(), message, [theirs.fileno()])
            except OSError:  # it has ended just now
                self._end()
                socket.send_fds(self._running(), message, [theirs.fileno()])
        return own

    @property
    def is_running(self) -> bool:
        """Whether the host can fork."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End the host and its forks."""
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        """Return the socket to the host, which is started if need be."""
        if self._control is not None and self.is_running:
            return self._control
        self._end()
        own, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - the command is a constant
                _COMMAND,
                stdin=theirs.fileno(),
                start_new_session=self._has_own_session,
            )
        self._control = own
        source = VocabularyMessage(str(self._source.tokenizer), self._source.vocab_size, self._source.eos_token_ids)
        with contextlib.suppress(OSError):  # it has ended at once, and the next call starts another
            write_message(own.fileno(), msgspec.msgpack.encode(source))
        return own

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._control = None


MAX_TRIES, MAX_CHECKS = 2, 1  # processes at once, each within its bounds of memory
MAX_VERDICTS = 4096  # results that are remembered, with some 700 bytes each: the texts of grammars are not kept

_encode = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(CheckAnswer).decode


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """Result of a check.

    Attributes:
        error: why the grammar cannot be used; None means that it can.
        is_light: as in `Grammar`.
    """

    error: str | None
    is_light: bool = False


class GrammarChecker:
    """Checks grammars for one vocabulary, and remembers the results. Safe to call from several threads.

    Args:
        source: vocabulary of the model.
    """

    def __init__(self, source: VocabularySource) -> None:
        self._host = GrammarHost(source)
        self._lock = Lock()
        self._room = {TRY: BoundedSemaphore(MAX_TRIES), CHECK: BoundedSemaphore(MAX_CHECKS)}
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()

    def known(self, grammar: Grammar) -> GrammarVerdict | None:
        """Return the result of an earlier check; None means that it is not remembered."""
        name = _name_of(grammar)
        with self._lock:
            verdict = self._verdicts.get(name)
            if verdict is not None:
                self._verdicts.move_to_end(name)
        return verdict

    def check(self, grammar: Grammar, role: str) -> GrammarVerdict | None:
        """Check `grammar` in a new process, which takes milliseconds to seconds.

        Args:
            role: `TRY` or `CHECK`.

        Returns:
            The result; None means that a try was too short.
        """
        with self._room[role]:
            has_begun, answer = self._ask(grammar, role)
            if not has_begun:
                _, answer = self._ask(grammar, role)  # something outside of the server has ended the host
        if answer is not None:
            verdict = GrammarVerdict(_decode_answer(answer).error, role == TRY)
        elif role == TRY:
            return None
        else:
            verdict = GrammarVerdict(excess(CHECK))
        with self._lock:
            self._verdicts[_name_of(grammar)] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _ask(self, grammar: Grammar, role: str) -> tuple[bool, bytes | None]:
        """Let a new process check `grammar`. Returns whether it has begun, and its answer; None if it has none."""
        has_begun, answer = False, None
        with self._host.fork(role) as process, contextlib.suppress(OSError):  # it has ended
            has_begun = read_message(process.fileno()) == BEGUN
            write_message(process.fileno(), _encode(grammar))
            answer = read_message(process.fileno())
        return has_begun, answer

    def close(self) -> None:
        """End all processes."""
        self._host.close()


def _name_of(grammar: Grammar) -> bytes:
    return blake2b(f"{grammar.kind}\0{grammar.text}".encode(), digest_size=16).digest()
