"""Checks clients' grammars in child processes, because a grammar may take minutes or exhaust memory.

Engines compile a grammar only after it passed the check, with the same library and the same limits.
"""

from __future__ import annotations

import logging
import signal
import sys
import weakref
from collections import OrderedDict
from threading import Lock

import msgspec

from moestro.core.grammar import Grammar
from moestro.grammar.check_job import TIME_LIMIT_S, CheckAnswer, CheckJob
from moestro.text.message_process import MessageProcess

logger = logging.getLogger(__name__)

MAX_VERDICTS = 1024  # results that are remembered
MAX_VERDICT_BYTES = 16 << 20  # texts of the grammars of these results

_COMMAND = (sys.executable, "-m", "moestro.grammar.check_worker")
_encode = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(CheckAnswer).decode


class GrammarChecker:
    """Checks grammars for one vocabulary, and remembers the results. Safe to call from several threads.

    The number of processes is the largest number of grammars checked at once. None outlives this object.

    Args:
        tokenizer: directory with tokenizer.json.
        vocab_size: number of columns of the model's logits.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocabulary = tokenizer, vocab_size, eos_token_ids
        self._lock = Lock()
        self._idle: list[MessageProcess] = []
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()
        self._verdict_bytes = 0
        self._end = weakref.finalize(self, _end_all, self._idle)

    def check(self, grammar: Grammar) -> str | None:
        """Return why `grammar` cannot be used; None means that it can. A new grammar takes milliseconds to seconds."""
        with self._lock:
            if grammar in self._verdicts:
                self._verdicts.move_to_end(grammar)
                return self._verdicts[grammar]
        answer = self._ask(grammar)
        if isinstance(answer, int) and answer != -signal.SIGALRM:
            answer = self._ask(grammar)  # something outside of the server may have ended the process
        error = answer.error if isinstance(answer, CheckAnswer) else _cause_of(answer)
        with self._lock:
            self._remember(grammar, error)
        return error

    def is_known(self, grammar: Grammar) -> bool:
        """Whether `check` returns at once."""
        return grammar in self._verdicts

    def close(self) -> None:
        """End the idle processes. One that checks a grammar ends with the check."""
        with self._lock:
            self._end()

    def _ask(self, grammar: Grammar) -> CheckAnswer | int:
        """Let a process check `grammar`. Returns its answer, or its status if it died."""
        with self._lock:
            while self._idle and not self._idle[-1].is_alive:
                self._idle.pop().close()
            process = self._idle.pop() if self._idle else MessageProcess(_COMMAND)
        try:
            answer = process.exchange(_encode(CheckJob(*self._vocabulary, grammar)))
            return answer if isinstance(answer, int) else _decode_answer(answer)
        finally:
            self._give_back(process)

    def _give_back(self, process: MessageProcess) -> None:
        with self._lock:
            if self._end.alive and process.is_alive:
                self._idle.append(process)
            else:
                process.close()

    def _remember(self, grammar: Grammar, error: str | None) -> None:
        if grammar not in self._verdicts:
            self._verdict_bytes += len(grammar.text)
        self._verdicts[grammar] = error
        while len(self._verdicts) > MAX_VERDICTS or self._verdict_bytes > MAX_VERDICT_BYTES:
            oldest, _ = self._verdicts.popitem(last=False)
            self._verdict_bytes -= len(oldest.text)


def _cause_of(status: int) -> str:
    """Explain the death of a process that checked a grammar."""
    if status == -signal.SIGALRM:
        return f"it takes more than {TIME_LIMIT_S:g} s to compile"
    return f"it takes more than the process that compiles it can bear (status {status})"


def _end_all(idle: list[MessageProcess]) -> None:
    for process in idle:
        process.close()
