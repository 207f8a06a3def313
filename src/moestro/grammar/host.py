"""The process from which all processes that run clients' grammars are forked.

A grammar is a program of the client: a mask may take minutes and exhaust memory, whatever limits its library promises.
So no grammar runs in a process that serves others. The host loads the vocabulary once; each fork of it shares that
memory, starts in milliseconds, and is bounded by the kernel.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from threading import Lock

import msgspec

from moestro.grammar.compiler import VocabularySource
from moestro.grammar.host_messages import ROLES, VocabularyMessage
from moestro.text.chats.render_job import write_message

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
            role: one of `host_messages.ROLES`.
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
