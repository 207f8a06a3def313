"""The process that checks grammars: `python -m moestro.grammar.check_worker`. It loads no torch.

A grammar is a program of the client, and some take minutes to compile. This process bounds its time and memory. It
reads jobs one after the other from stdin and writes the answers to stdout.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from moestro.grammar.check_job import MEMORY_LIMIT_BYTES, TIME_LIMIT_S, CheckAnswer, CheckJob
from moestro.grammar.compiler import GrammarCompiler, GrammarError, VocabularySource, failure_of
from moestro.text.render_job import read_message, write_message

_encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.msgpack.Decoder(CheckJob).decode
_compiler_for = lru_cache(maxsize=1)(GrammarCompiler)


def main() -> None:
    """Check until stdin ends, which happens when the parent process ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the alarm ends the process, whatever it is doing
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (body := read_message(0)) is not None:
        write_message(1, _encode(CheckAnswer(_error_of(_decode_job(body)))))


def _error_of(job: CheckJob) -> str | None:
    """Compile the job's grammar and compute its first mask, which finds grammars that match no text."""
    try:
        compiler = _compiler_for(VocabularySource(Path(job.tokenizer), job.vocab_size, job.eos_token_ids))
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
        matcher = compiler.compile(job.grammar)
        words = np.zeros(-(-compiler.num_tokens // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return failure_of(matcher)
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return f"it takes more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the server ended during a check
        main()
