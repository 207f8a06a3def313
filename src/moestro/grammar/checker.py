"""Checks clients' grammars in forked processes, because a grammar may take minutes or exhaust memory.

A new grammar first gets a short try. Ordinary ones pass it; the others are checked again with more time, one after the
other and with a low priority. So a slow grammar delays an ordinary one by the time of a try.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from threading import BoundedSemaphore, Lock

import msgspec

from moestro.core.request import Grammar
from moestro.grammar.compiler import VocabularySource
from moestro.grammar.host import BEGUN, CHECK, TRY, CheckAnswer, GrammarHost, excess
from moestro.text.chats.chat_template import read_message, write_message

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
