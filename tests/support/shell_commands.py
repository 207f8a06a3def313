"""A `moestro` for the shells of tests: its commands run in forks of the forker, as `run_command` runs them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from support.cpu_seconds import PROGRAMS, Program
from support.forker import address_of
from support.running import MOESTRO

# Stands for the fork in its shell: passes signals on, and ends with its status. It starts in a fiftieth of a second.
_STAND_IN = """#!{python} -SI
import json, os, signal, socket, sys

command = [{moestro!r}, *sys.argv[1:]]
environment = dict(os.environ, PATH={path!r})
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forker:
    try:
        forker.connect({address!r})
        request = {{"command": command, "environment": environment, "directory": os.getcwd()}}
        socket.send_fds(forker, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(forker.recv(1000))
    except (OSError, ValueError):  # there is no forker, or it refuses
        os.execve(command[0], command, environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status, used_s = forker.recv(64).decode().split()
with open({usage!r}, "a") as usage:
    usage.write(used_s + "\\n")
sys.exit(int(status) if int(status) >= 0 else 128 - int(status))
"""


@contextlib.contextmanager
def forked_commands(directory: Path) -> Iterator[str]:
    """Give a PATH whose `moestro` runs in forks, and whose `python` is that of the tests."""
    stand_in, usage = directory / "bin" / "moestro", directory / "usage"
    stand_in.parent.mkdir()
    stand_in.write_text(
        _STAND_IN.format(
            python=sys.executable,
            moestro=MOESTRO,
            path=os.environ["PATH"],
            address=address_of(computes=True),
            usage=str(usage),
        )
    )
    stand_in.chmod(0o755)
    try:
        yield os.pathsep.join([str(stand_in.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    finally:
        if usage.exists():
            PROGRAMS.append(Program(0, sum(map(float, usage.read_text().split())), has_ended=True))
