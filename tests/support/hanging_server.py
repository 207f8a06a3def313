"""`moestro serve` before fake ranks, or `moestro route`, with something that hangs.

Arguments: what hangs (executor, threads, loop, stderr, tokenizer, native, interpreter), then the verb and its flags.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from replaced import replace_names

from moestro.cli import main
from moestro.gateway import server as gateway_server
from moestro.server import server
from moestro.server.processes import watchdog
from moestro.web.ports import lifecycle


def spin(*_: object) -> None:
    """An endless loop, as a template or a regular expression may have; it leaves the machine to other tests."""
    while True:
        sum(range(1000))
        time.sleep(0.0005)


def block_stderr() -> None:
    """Turn stderr into a pipe without a reader, so that a log call waits for ever."""
    os.dup2(os.pipe()[1], 2)
    while True:
        logging.error("x" * 4096)


def hold_the_interpreter() -> None:
    """Once a signal was taken: a regular expression that holds the interpreter's lock for longer than anybody waits."""
    while not signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(0.01)
    re.match(r"(a+)+$", "a" * 60 + "b")


def hold_natively(*_: object) -> None:
    """Native code that holds the interpreter's lock, as the reader of a large vocabulary does."""
    os.write(2, b"native code holds the interpreter\n")
    ctypes.PyDLL(None).sleep(600)


def hang(what: str) -> None:
    if what == "executor":
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    elif what == "threads":
        ThreadPoolExecutor(1, "prepare").submit(spin)
    elif what == "interpreter":
        threading.Thread(target=hold_the_interpreter).start()
    elif what in ("loop", "stderr"):
        asyncio.get_running_loop().call_later(0.1, spin if what == "loop" else block_stderr)


if __name__ == "__main__":
    _, what, *arguments = sys.argv
    replace_names(lifecycle, EXIT_S=1.0, _ALARM_S=0.5)
    replace_names(watchdog, FIRST_DELAY_S=0.02)
    for process in (server._ServeProcess, gateway_server._RouteServer):

        def announce(self, *given, real=process._announce):
            real(self, *given)
            hang(what)

        replace_names(process, _announce=announce)
    real = server.serve
    command = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
    replace_names(server, serve=lambda settings: real(settings, command))
    if what == "tokenizer":
        replace_names(server, Tokenizer=spin)
    elif what == "native":
        replace_names(server, Tokenizer=hold_natively)
    main(arguments)
