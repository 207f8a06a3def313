"""The process that has loaded the libraries of servers and ranks, and forks them: `forker.py` starts it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from moestro.config.linux_process import die_with_parent

Program = Callable[[], NoReturn]

_PYTHON, _MOESTRO = sys.executable, str(Path(sys.executable).with_name("moestro"))
_SERVERS = ("moestro.cli", "moestro.server.server", "moestro.gateway.server", "moestro.worker.paced_worker")
_CHILDREN = ("moestro.text.chats.template_worker", "moestro.grammar.host_process")  # of servers and ranks
_OWNED_SERVER = ("-m", "moestro.cli.owned_server")
_NETWORKS = ("moestro.worker.network_rank", "moestro.worker.worker")
# What verbs and flags import beside them.
_WORDS = {
    "bench": "moestro.loadgen.runner",
    "calibrate": "moestro.calibrate.probing.verb",
    "run-batch": "moestro.offline.batch_file",
    "sim": "moestro.sim.verb",
    "--ext-proc": "moestro.gateway.picker.port",
    "--tokenizer": "moestro.gateway.clients.tokenized_blocks",
    "--workers": "moestro.gateway.workers",
}
# Programs of tests whose ranks compute; those of the other ones are fakes.
_NETWORK_PROGRAMS = ("imitated_server.py", "imitating_server.py", "migrating_server.py", "restless_server.py")
# Variables that libraries read when they are loaded. A program that needs other values runs in a process of its own.
_READ_ON_IMPORT = ("CUDA", "HF_", "LD_", "MKL", "OMP_", "PATH", "PYTHON", "RAY", "TORCH", "TRANSFORMERS", "TRITON")
# Variables that libraries and the product set in a process of tests, and that no library reads when it is loaded.
_SET_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_MESSAGE_BYTES = 1 << 20
_FORK_S = 60.0  # Time for a fork on the busiest machine; the product's own bound is for machines that serve.


def main() -> Program:
    """Fork a program for each request; returns, in each fork, what it runs."""
    die_with_parent()
    # What libraries create stays, and forks share its memory: the collector would write to all of it.
    gc.disable()
    given = read_on_import(os.environ)
    listener = socket.socket(fileno=os.dup(0))
    running: dict[int, tuple[socket.socket, int]] = {}  # descriptor of a process -> socket of its test, process id
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is not listener:
                    events.unregister(key.fileobj)
                    _report_end(*running.pop(key.fd), key.fd)
                    continue
                client, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, 3)
                request = json.loads(message) if message else None  # None: the test process has ended
                if refusal := _refusal(request, given) if request else "no request":
                    _send(client, refusal)
                    for descriptor in (client.detach(), *descriptors):
                        os.close(descriptor)
                    continue
                _load(request["command"])
                if (pid := os.fork()) == 0:
                    return lambda: _run_request(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                _send(client, str(pid))
                running[pidfd := os.pidfd_open(pid)] = client, pid
                events.register(pidfd, selectors.EVENT_READ)


def read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide whether a fork can run a program: those that libraries read when loaded."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_ON_IMPORT) and name not in _SET_LATER
    }


def _report_end(client: socket.socket, pid: int, pidfd: int) -> None:
    _, status, used = os.wait4(pid, 0)
    os.close(pidfd)
    _send(client, f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}")
    client.close()


def _send(client: socket.socket, text: str) -> None:
    with contextlib.suppress(ConnectionError):  # the test process has ended
        client.send(text.encode())


def _refusal(request: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """Why a program has to run in a process of its own; empty if a fork can run it."""
    command = request["command"]
    is_owned = tuple(command[1:3]) == _OWNED_SERVER
    if command[0] != _MOESTRO and not (command[0] == _PYTHON and (is_owned or command[1].endswith(".py"))):
        return f"it is not a program of {_PYTHON}"
    others = sorted(name for name, _ in given.items() ^ read_on_import(request["environment"]).items())
    return f"other values of {', '.join(dict.fromkeys(others))}" if others else ""


def _serves(command: Sequence[str]) -> bool:
    return command[0] == _PYTHON or "serve" in command[1:2]


def has_networks(command: Sequence[str]) -> bool:
    """Whether ranks of a program compute, so that they need torch and transformers."""
    if command[0] == _PYTHON and command[1] != "-m":
        computes = Path(command[1]).name in _NETWORK_PROGRAMS
    else:
        computes = _serves(command)
    is_paced = ("--paced-arithmetic", "none") in itertools.pairwise(command) or "--paced-arithmetic=none" in command
    return computes and not is_paced


def _load(command: Sequence[str]) -> None:
    """Load the libraries that a program and its ranks need, unless they are loaded."""
    computes = has_networks(command)
    words = [module for word, module in _WORDS.items() if word in command]
    for name in (*_SERVERS, *_CHILDREN, *words, *(_NETWORKS if computes else ())):
        importlib.import_module(name)
    if computes:
        sys.modules["moestro.model.load"].load_ahead()
    _fork_children()
    gc.freeze()


def _fork_children() -> None:
    """Let servers and ranks fork their child processes; each would import libraries for a quarter of a second."""
    for name in ("moestro.text.child_process", "moestro.grammar.host"):
        replace_names(sys.modules[name], subprocess=SimpleNamespace(**vars(subprocess) | {"Popen": _started}))


# --- in a fork


def _run_request(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    for target, source in enumerate(streams):  # each source is above 2: the forker has streams of its own
        os.dup2(source, target)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # that of the forker, if a library has looked for it
    os.chdir(request["directory"])
    command = request["command"]
    if _serves(command):
        _fork_ranks_too()
    gc.enable()
    _run(command[1:] if command[0] == _PYTHON else command)


def _run(command: Sequence[str]) -> NoReturn:
    """Run a Python program, given as after `python`, as the interpreter does."""
    status: object = 0
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.modules.pop(command[1], None)  # or runpy warns that it is loaded
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path[0] = str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    # The interpreter would take seconds to unload torch's modules.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes] | ForkedChild:
    """Start a process as `subprocess.Popen` does; one that runs a module of `_CHILDREN` is a fork of this process."""
    python, *words = command
    if (python, words[0]) != (_PYTHON, "-m") or words[1] not in _CHILDREN:
        return subprocess.Popen(command, **options)
    return ForkedChild(words[1], **options)


class ForkedChild:
    """A fork of this process that runs a module; has the methods of `subprocess.Popen` that the product uses."""

    def __init__(
        self, module: str, *, stdin: int, stdout: int | None = None, start_new_session: bool, bufsize: int = 0
    ) -> None:
        assert bufsize == 0
        self.returncode: int | None = None
        self._turn = threading.Lock()
        read, write = os.pipe() if stdin == subprocess.PIPE else (os.dup(stdin), None)
        answers, answer = os.pipe() if stdout == subprocess.PIPE else (None, os.dup(1))
        if (pid := os.fork()) == 0:
            _run_child(module, (read, answer), start_new_session=start_new_session)
        self.pid = pid
        os.close(read)
        os.close(answer)
        self.stdin = None if write is None else os.fdopen(write, "wb", 0)
        self.stdout = None if answers is None else os.fdopen(answers, "rb", 0)

    def __enter__(self) -> ForkedChild:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError), _pidfd_of(self.pid) as pidfd:
                ends = select.poll()
                ends.register(pidfd, select.POLLIN)
                if not ends.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired("", timeout or 0)
            with self._turn:
                if self.returncode is None:
                    _, status = os.waitpid(self.pid, 0)
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def _pidfd_of(pid: int) -> Iterator[int]:
    """Give a descriptor that is readable once a process has ended."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _run_child(module: str, streams: Sequence[int], *, start_new_session: bool) -> NoReturn:
    """Become a process that runs a module: without descriptors, signals and names of the one that it is a fork of."""
    try:
        _rename(module)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        for target, source in enumerate(streams):
            os.dup2(source, target)
        os.closerange(3, 1 << 16)
        if start_new_session:
            os.setsid()
        gc.freeze()
        with contextlib.suppress(BrokenPipeError):
            sys.modules[module].main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _rename(module: str) -> None:
    """Show a module as the command of this process, which may have been renamed before."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number - 2]) for number in (47, 48))  # arg_start and arg_end of proc(5)
    title = f"{_PYTHON} -m {module}".encode()[: end - start - 2]
    # Where the last byte is not 0, the kernel shows all up to the first 0.
    ctypes.memmove(start, title.ljust(end - start - 1, b"\0") + b".", end - start)
    Path("/proc/self/comm").write_text("python")


def _fork_ranks_too() -> None:
    """Give the server that this process will run a process on standby, which forks all of its ranks."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.getpid()
    if (pid := os.fork()) == 0:
        control.close()
        _stand_by(theirs, server)
    theirs.close()
    control.settimeout(0)
    _replace_launcher(pid, control)


def _stand_by(control: socket.socket, server: int) -> NoReturn:
    from moestro.worker.rank_process import fork_workers  # noqa: PLC0415 it is loaded when this runs

    os.setsid()
    die_with_parent()
    message = control.recv(_MESSAGE_BYTES) if os.getppid() == server else b""
    if not message:
        os._exit(0)
    command, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(control.fileno(), 0)
    control.close()
    if not fork_workers():
        os._exit(0)
    gc.enable()
    _run(command[1:])


def _replace_launcher(pid: int, control: socket.socket) -> None:
    from moestro.server.processes import launch_specs, launchers  # noqa: PLC0415 they are loaded when this runs
    from moestro.server.processes.launchers import WORKER, ForkedProcess, LocalLauncher  # noqa: PLC0415

    class ForkingLauncher(LocalLauncher):
        """The launcher of modes with processes on standby, of which the first one is there already."""

        def __init__(self, directory: Path, num_ranks: int, command: Sequence[str] = WORKER, **_: bool) -> None:
            super().__init__(directory, num_ranks, command, has_standby=True)
            control.send(json.dumps((command, dict(self._environment))).encode())

        async def open(self) -> None:
            await super().open()
            process = ForkedProcess(pid, os.dup(control.fileno()), "", None)
            self._standby._add(launchers._Template(process, control, is_loaded=False))

    replace_names(launchers, _FORK_S=_FORK_S)
    replace_names(launch_specs, LocalLauncher=ForkingLauncher)


if __name__ == "__main__":
    from replaced import replace_names

    sys.path.pop(0)  # tests/support
    main()()
