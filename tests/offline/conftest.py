"""Servers that `LLM` and the offline commands start are forks of a process that has loaded their libraries."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.forker import ForkedProgram

from moestro.offline import server


class ForkedServer(ForkedProgram):
    """The fork of a server, with pipes as `OwnedServer` wants them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        (read, write), (answers, answer) = os.pipe(), os.pipe()
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(os.close, write)
            unless_started.callback(os.close, answers)
            try:
                super().__init__(command, (read, answer, 2), environment)
            finally:
                os.close(read)
                os.close(answer)
            unless_started.pop_all()
        self.stdin, self.stdout = os.fdopen(write, "wb", 0), os.fdopen(answers, "rb")

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _start(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes] | ForkedServer:
    with contextlib.suppress(OSError):
        return ForkedServer(command, env)
    return subprocess.Popen(command, env=env, **options)


@pytest.fixture(scope="module", autouse=True)
def _forked_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _start}))
        yield
