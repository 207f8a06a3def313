"""Processes of a router with several workers: starts them, restarts those that die, and stops them all.

The starting process has no event loop and no threads, so it can fork at any time. Its own sockets only reserve the
ports: they do not listen, so the kernel gives a dead worker's connections to the others.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from moestro.config.idle_flags import warn_of_idle_flags
from moestro.errors import MoestroError
from moestro.gateway.kv.prompt_blocks import PromptReader
from moestro.gateway.server import WorkerPlace, route
from moestro.gateway.settings import ROUTE_NEEDS, RouteSettings
from moestro.gateway.workers.operators import OperatorsPlace, serve_operators
from moestro.gateway.workers.starts import WorkerStarts
from moestro.web.access.rate_limits import SharedLimits
from moestro.web.ports.connections import bound_socket
from moestro.web.ports.lifecycle import EXIT_S, set_up_logging

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_ANY = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # until a worker that died is started again
_IDLE_S = 1.0  # longest wait for a signal; the end of a process is one
_STEADY_S = 10.0  # a worker that lived so long starts again after the first pause
_SETTINGS_STATUS = 2  # exit status of a process whose settings cannot be honoured
_MARGIN_S = 10.0


def route_with_workers(settings: RouteSettings, prompt_reader: PromptReader) -> None:
    """Run a router's workers until SIGTERM or SIGINT. A second signal does not wait for running requests.

    Raises:
        SystemExit: A process could not start; its own message says why.
        ConfigError: The settings name ports that cannot be used.
    """
    set_up_logging(settings.front.log_level)
    warn_of_idle_flags(settings, ROUTE_NEEDS)
    with ExitStack() as reserved:
        plan = _WorkerPlan.of(settings, reserved)
        status = _Supervisor(settings, prompt_reader, plan).run()
    if status:
        sys.exit(status)


@dataclass(frozen=True, slots=True)
class _WorkerPlan:
    """Ports and keys of the workers.

    Attributes:
        clients: port that all workers share.
        operators: port of the common admin plane.
        admin: port of each worker's own admin plane, at the loopback address.
        peers: port of each worker for other routers.
        admin_key: key of the workers' own admin planes.
        peer_key: key of the routers' ports.
    """

    clients: int
    operators: socket.socket
    admin: tuple[int, ...]
    peers: tuple[int, ...]
    admin_key: str
    peer_key: str | None

    @classmethod
    def of(cls, settings: RouteSettings, reserved: ExitStack) -> _WorkerPlan:
        """Reserve the ports.

        Raises:
            ConfigError: Another program has one of them.
        """
        front, admin, peers, num = settings.front, settings.admin, settings.peers, settings.front.workers

        def reserve(host: str, port: int, flags: str) -> int:
            if port:
                bound_socket(host, port, flags).close()  # A shared socket would not notice another program's.
            shared = reserved.enter_context(bound_socket(host, port, flags, is_shared=True))
            return int(shared.getsockname()[1])

        first = peers.peer_port if peers.has_peers else 0
        peer_ports = [reserve(peers.peer_host, first and first + at, "--peer-host or --peer-port") for at in range(num)]
        operators = bound_socket(admin.admin_host, admin.admin_port, "--admin-host or --admin-port")
        return cls(
            clients=reserve(front.host, front.port, "--host or --port"),
            operators=reserved.enter_context(operators),
            admin=tuple(reserve(_LOOPBACK, 0, "--workers") for _ in range(num)),
            peers=tuple(peer_ports),
            admin_key=secrets.token_urlsafe(32),
            peer_key=peers.peer_key if peers.has_peers else secrets.token_urlsafe(32),
        )

    def settings_of(self, settings: RouteSettings, at: int) -> RouteSettings:
        """Return the settings of worker number `at`."""
        front, peers, record, access = settings.front, settings.peers, settings.record.record, settings.access
        num, queue = front.workers, settings.queue
        host = _LOOPBACK if peers.peer_host in _ANY else peers.peer_host
        scheme = "http" if peers.files.certfile is None else "https"
        others = tuple(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for port in self.peers)
        return replace(
            settings,
            front=replace(front, port=self.clients, max_connections=_part(front.max_connections, num), workers=1),
            access=replace(access, max_connections_per_address=_part(access.max_connections_per_address, num)),
            queue=replace(
                queue,
                queue_max_requests=_part(queue.queue_max_requests, num),
                queue_max_tokens=_part(queue.queue_max_tokens, num),
            ),
            admin=replace(
                settings.admin, admin_host=_LOOPBACK, admin_port=self.admin[at], admin_api_key=self.admin_key
            ),
            peers=replace(peers, peer=peers.peer + others, peer_port=self.peers[at], peer_key=self.peer_key),
            record=replace(settings.record, record=None if record is None else numbered(record, at)),
        )


_Bound = TypeVar("_Bound", int, int | None)


def _part(bound: _Bound, num: int) -> _Bound:
    """Return the part of a bound that each of `num` workers has; None means no limit.

    The kernel spreads connections over the workers, so each of them gets as many of a client's as any other.
    """
    return bound if bound is None else math.ceil(bound / num)


def numbered(path: Path, at: int) -> Path:
    """Return the path of worker number `at`: `record.0.jsonl` for `record.jsonl`."""
    return path.with_name(f"{path.stem}.{at}{path.suffix}")


@dataclass(slots=True)
class _Process:
    """A child process, or its successor.

    Attributes:
        run: body of the process.
        pid: None while it does not run.
        pause_s: time until a successor starts after an early end.
        due_s: time at which it starts again.
    """

    name: str
    run: Callable[[], None]
    pid: int | None = None
    started_s: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    due_s: float = 0.0


class _Supervisor:
    """Keeps the workers and the process of the admin plane running."""

    def __init__(self, settings: RouteSettings, prompt_reader: PromptReader, plan: _WorkerPlan) -> None:
        self._stop_s = settings.front.shutdown_timeout + EXIT_S + _MARGIN_S
        self._lifeline, self._held = os.pipe()
        self._starts = WorkerStarts(settings.front.workers)
        self._limits = SharedLimits(settings.front.workers)
        self._is_stopping = False
        self._status = 0
        self._workers = [
            _Process(f"worker {at}", self._worker(plan.settings_of(settings, at), prompt_reader, at))
            for at in range(settings.front.workers)
        ]
        place = OperatorsPlace(
            listener=plan.operators,
            clients_port=plan.clients,
            worker_ports=plan.admin,
            worker_key=plan.admin_key,
            starts=self._starts,
            lifeline=self._lifeline,
            prompts=prompt_reader.words,
        )
        self._operators = _Process("the admin plane", lambda: serve_operators(settings, place))

    def _worker(self, settings: RouteSettings, prompt_reader: PromptReader, at: int) -> Callable[[], None]:
        place = WorkerPlace(self._lifeline, self._limits, self._starts, at)
        return lambda: route(settings, prompt_reader, worker=place)

    def run(self) -> int:
        """Run until a signal, and return the exit status."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            while not self._is_stopping:
                self._start_due()
                is_any_due = any(process.pid is None for process in (*self._workers, self._operators))
                self._wait(_FIRST_PAUSE_S if is_any_due else _IDLE_S)
            self._stop(self._workers)
            self._stop([self._operators])
        finally:
            for process in (*self._workers, self._operators):
                if process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._status

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for process in (*self._workers, self._operators):
            if process.pid is None and now_s >= process.due_s:
                process.started_s = now_s
                if process in self._workers:
                    self._starts.begin(self._workers.index(process))
                process.pid = self._fork(process)

    def _fork(self, process: _Process) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches the starting process alone, which passes it on.
            os.close(self._held)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            process.run()
            status = 0
        except MoestroError as error:
            sys.stderr.write(f"moestro: {error}\n")
            status = _SETTINGS_STATUS
        except BaseException:
            logger.exception("%s failed", process.name)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _wait(self, seconds: float) -> None:
        """Wait for a signal, and look after the processes."""
        found = signal.sigtimedwait(_SIGNALS, seconds)
        if found is not None and found.si_signo != signal.SIGCHLD:
            if self._is_stopping:
                self._signal(self._workers, signal.SIGTERM)
            self._is_stopping = True
        self._reap()

    def _reap(self) -> None:
        for process in (*self._workers, self._operators):
            if process.pid is None:
                continue
            pid, state = os.waitpid(process.pid, os.WNOHANG)
            if not pid:
                continue
            process.pid = None
            self._ended(process, os.waitstatus_to_exitcode(state))

    def _ended(self, process: _Process, status: int) -> None:
        now_s = time.monotonic()
        if self._is_stopping:
            self._status = self._status or max(status, 0)
            return
        if status == _SETTINGS_STATUS:
            self._status, self._is_stopping = status, True
            return
        if now_s - process.started_s >= _STEADY_S:
            process.pause_s = _FIRST_PAUSE_S
        logger.warning("%s ended with status %d, and starts again in %g s", process.name, status, process.pause_s)
        process.due_s = now_s + process.pause_s
        process.pause_s = min(_LONGEST_PAUSE_S, 2 * process.pause_s)

    def _signal(self, processes: list[_Process], number: signal.Signals) -> None:
        for process in processes:
            if process.pid is not None:
                os.kill(process.pid, number)

    def _stop(self, processes: list[_Process]) -> None:
        """Let processes end, and end those that do not."""
        self._signal(processes, signal.SIGTERM)
        deadline_s = time.monotonic() + self._stop_s
        while any(process.pid is not None for process in processes) and time.monotonic() < deadline_s:
            self._wait(_FIRST_PAUSE_S)
