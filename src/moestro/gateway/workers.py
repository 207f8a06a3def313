"""Several processes that serve one port as routers that are peers of each other, and their one admin plane.

The starting process has no event loop and no threads, so it can fork at any time. Its own sockets only reserve the
ports: they do not listen, so the kernel gives a dead worker's connections to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from moestro.config.idle_flags import warn_of_idle_flags
from moestro.errors import ConfigError, MoestroError
from moestro.gateway.admin import (
    MAX_BODY_BYTES,
    AdminHandlers,
    EngineView,
    admin_runner,
    url_to_add,
)
from moestro.gateway.clients.request_body import PromptReader
from moestro.gateway.discovery.operator_changes import ChangeMade, OperatorChange, OperatorChanges
from moestro.gateway.figures import RouteSummary, route_banner
from moestro.gateway.server import route
from moestro.gateway.settings import ROUTE_NEEDS, AdminSettings, EngineUrl, RouteSettings
from moestro.gateway.worker_place import WorkerPlace, WorkerStarts
from moestro.web.banner import print_banner
from moestro.web.bodies import Bodies
from moestro.web.errors import HttpError
from moestro.web.figures import CONTENT_TYPE, Durations, EngineStatistics, LiveStatistics, limit_in
from moestro.web.ports.connections import MAX_OPERATOR_CONNECTIONS, FrontLimits, bound_socket, http_front, url_of
from moestro.web.ports.faults import Faults, Port
from moestro.web.ports.lifecycle import (
    EXIT_S,
    Lifecycle,
    process_age_s,
    run_server,
    set_up_logging,
    stop_with,
    wait_until,
)
from moestro.web.rate_limits import SharedLimits

logger = logging.getLogger(__name__)


_SUMMED = ("num_in_flight", "num_decisions")
_UP = "up"


def merged_metrics(texts: Mapping[int, str]) -> bytes:
    """Return the metrics of all workers in Prometheus' text format, each sample with the label `worker`.

    Args:
        texts: metrics of each worker, by its number.
    """
    heads: dict[str, list[str]] = {}  # HELP and TYPE of each family, in order
    samples: dict[str, list[str]] = {}
    for worker, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known and len(known) < 2:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, worker))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return ("\n".join(lines) + "\n").encode()


def _labelled(sample: str, worker: int) -> str:
    """Return a sample with the label `worker` before its others."""
    name, brace, labels = sample.partition("{")
    if brace:
        return f'{name}{{worker="{worker}",{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'


def merged_statistics(parts: Sequence[LiveStatistics], clients_port: int, operators_port: int) -> LiveStatistics:
    """Return the figures of all workers together. There is at least one.

    Args:
        clients_port, operators_port: ports that all workers share.
    """
    first = parts[0]
    by_name: dict[str, list[EngineStatistics]] = {}
    for part in parts:
        for engine in part.engines:
            by_name.setdefault(engine.name, []).append(engine)
    return msgspec.structs.replace(
        first,
        num_requests=sum(part.num_requests for part in parts),
        num_refused=sum(part.num_refused for part in parts),
        num_client_errors=sum(part.num_client_errors for part in parts),
        num_overload=sum(part.num_overload for part in parts),
        num_retried=sum(part.num_retried for part in parts),
        first_token_s=_merged_durations([part.first_token_s for part in parts]),
        clients_port=clients_port,
        operators_port=operators_port,
        engines=[_merged_engine(each) for each in by_name.values()],
    )


def _merged_durations(parts: Iterable[Durations | None]) -> Durations | None:
    found = [part for part in parts if part is not None]
    if not found:
        return None
    counts = [sum(each) for each in zip(*(part.counts for part in found), strict=True)]
    return Durations(found[0].bounds, counts)


def _merged_engine(parts: Sequence[EngineStatistics]) -> EngineStatistics:
    return msgspec.structs.replace(
        parts[0],
        condition=_worst([part.condition for part in parts]),
        num_in_flight=sum(part.num_in_flight for part in parts),
        num_requests=sum(part.num_requests for part in parts),
        num_prompt_tokens=sum(part.num_prompt_tokens for part in parts),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
    )


def merged_engines(parts: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the engines that workers show, each once: counts are summed, and a condition other than `up` is shown."""
    found: dict[str, dict[str, Any]] = {}
    for engines in parts:
        for engine in engines:
            known = found.get(engine["name"])
            if known is None:
                found[engine["name"]] = dict(engine)
                continue
            for name in _SUMMED:
                known[name] += engine[name]
            known["condition"] = _worst([known["condition"], engine["condition"]])
            known["cause"] = known["cause"] or engine["cause"]
    return list(found.values())


def merged_decisions(parts: Iterable[Sequence[Mapping[str, Any]]], limit: int) -> list[Mapping[str, Any]]:
    """Return the newest decisions of all workers, at most `limit`."""
    decisions = [decision for part in parts for decision in part]
    return sorted(decisions, key=lambda decision: float(decision["time"]), reverse=True)[:limit]


def _worst(conditions: Sequence[str]) -> str:
    return next((condition for condition in conditions if condition != _UP), _UP)


_ANSWER_S = 5.0  # time for a worker to answer
_NONE_ANSWERS = "No worker answers: all of them are starting or gone. Try again."


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorsPlace:
    """What the process of the admin plane has from the process that started it.

    Attributes:
        listener: bound socket of the admin plane.
        clients_port: port that all workers share.
        worker_ports: port of each worker's own admin plane.
        worker_key: key of these.
        starts: stage of each worker's start.
        changes: operators' changes of engines, which this process writes.
        lifeline: end of a pipe, which is closed when the starting process is gone.
        prompts: method of comparing prompts, in words.
    """

    listener: socket.socket
    clients_port: int
    worker_ports: tuple[int, ...]
    worker_key: str
    starts: WorkerStarts
    changes: OperatorChanges
    lifeline: int
    prompts: str


def serve_operators(settings: RouteSettings, place: OperatorsPlace) -> None:
    """Serve the admin plane of all workers until SIGTERM or SIGINT."""
    run_server(
        lambda lifecycle: _serve(settings, place, lifecycle),
        log_level=settings.front.log_level,
        shutdown_timeout_s=settings.front.shutdown_timeout,
    )


async def _serve(settings: RouteSettings, place: OperatorsPlace, lifecycle: Lifecycle) -> None:
    stop_with(place.lifeline)
    async with Workers.connected(place) as workers:
        admin = WorkersAdmin(workers, place)
        runner = await admin.runner(settings.admin, lifecycle.faults)
        limits = FrontLimits(MAX_OPERATOR_CONNECTIONS, settings.access.max_connections_per_address)
        server = http_front(Port.OPERATORS, runner, place.listener, limits, lifecycle.faults).open()
        lifecycle.is_serving = True
        announcing = asyncio.create_task(_announce(workers, settings, place))
        try:
            await lifecycle.stop_requested.wait()
        finally:
            announcing.cancel()
            server.close()
            await runner.cleanup()


async def _announce(workers: Workers, settings: RouteSettings, place: OperatorsPlace) -> None:
    """Show the banner once all workers serve."""
    await wait_until(place.starts.are_serving, math.inf)
    views = merged_engines(answer.content()["engines"] for answer in await workers.ask_all("GET", "/admin/engines"))
    scheme = "https" if settings.tls.ssl_certfile is not None else "http"
    host = f"[{settings.front.host}]" if ":" in settings.front.host else settings.front.host
    summary = RouteSummary(
        engines=msgspec.convert(views, list[EngineView]),
        policy=settings.policy.route_policy,
        prompts=place.prompts,
        url=f"{scheme}://{host}:{place.clients_port}",
        admin_url=url_of(place.listener),
        needs_key=bool(settings.front.api_key or settings.access.api_key_file),
        seconds=process_age_s(),
        peers=settings.peers.peer,
        num_workers=len(place.worker_ports),
    )
    print_banner(route_banner(summary))


@dataclass(frozen=True, slots=True)
class Answered:
    """A worker's answer."""

    worker: int
    status: int
    body: bytes
    content_type: str

    def content(self) -> Any:
        """Return the parsed body."""
        return msgspec.json.decode(self.body)

    def response(self) -> web.Response:
        """Return the answer as this port's own."""
        return web.Response(status=self.status, body=self.body, content_type=self.content_type or None)


@dataclass(slots=True)
class _Worker:
    """A worker's own admin plane."""

    number: int
    url: str


@dataclass(slots=True)
class Workers:
    """Asks the workers' own admin planes."""

    session: aiohttp.ClientSession
    place: OperatorsPlace
    workers: list[_Worker]
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, place: OperatorsPlace) -> AsyncIterator[Workers]:
        """Yield the workers, and close the connections to them at the end."""
        async with aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {place.worker_key}"},
            timeout=aiohttp.ClientTimeout(_ANSWER_S),
        ) as session:
            ports = enumerate(place.worker_ports)
            yield cls(session, place, [_Worker(number, f"http://127.0.0.1:{port}") for number, port in ports])

    async def ask(self, worker: _Worker, method: str, path: str, body: bytes = b"") -> Answered | None:
        """Return a worker's answer; None means that it does not answer."""
        try:
            async with self.session.request(method, f"{worker.url}{path}", data=body or None) as answer:
                return Answered(worker.number, answer.status, await answer.read(), answer.content_type)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def ask_all(self, method: str, path: str, body: bytes = b"") -> list[Answered]:
        """Return the answers of all workers.

        Raises:
            HttpError: None of them answers.
        """
        answers = await asyncio.gather(*(self.ask(worker, method, path, body) for worker in self.workers))
        found = [answer for answer in answers if answer is not None]
        if not found:
            raise HttpError(503, _NONE_ANSWERS, "no_worker")
        return found

    async def change_all(
        self, method: str, path: str, change: OperatorChange | None = None, body: bytes = b""
    ) -> Answered:
        """Let all workers change their engines, also those that start later, and return one answer.

        A refusal of any worker is returned in place of the others' answers. But a worker whose lists do not name the
        engine makes the change when they do.

        Args:
            change: the change that the request asks for; None means that it asks for none in a known form.

        Raises:
            HttpError: None of them answers.
        """
        shared = self.place.changes
        async with self.changing:
            before = shared.read()
            if change is not None:
                # A worker that opens its admin plane from now on reads the change; the others get the request.
                shared.write([*before, change])
            is_taken = False
            try:
                answers = await self.ask_all(method, path, body)
                is_taken = any(answer.status < HTTPStatus.BAD_REQUEST for answer in answers)
            finally:
                if not is_taken:
                    shared.write(before)
            if is_taken:
                answers = [answer for answer in answers if answer.status != HTTPStatus.NOT_FOUND]
            return max(answers, key=lambda answer: answer.status)


class WorkersAdmin:
    """Handles the operator's requests."""

    def __init__(self, workers: Workers, place: OperatorsPlace) -> None:
        self._workers = workers
        self._place = place
        self._bodies = Bodies(max_body_bytes=MAX_BODY_BYTES)

    async def runner(self, settings: AdminSettings, faults: Faults) -> web.AppRunner:
        """Return an aiohttp runner of the admin plane, set up to serve."""
        handlers = AdminHandlers(
            metrics=self.metrics,
            engines=self.engines,
            add=self.add,
            engine=self.engine,
            remove=self.remove,
            drain=self.drain,
            resume=self.resume,
            explain=self.explain,
            decisions=self.decisions,
            statistics=self.statistics,
        )
        return await admin_runner(handlers, settings, faults)

    async def metrics(self, _http: web.Request) -> web.Response:
        """Handle GET /metrics: return the metrics of all workers, with the label `worker`."""
        answers = await self._workers.ask_all("GET", "/metrics")
        body = merged_metrics({answer.worker: answer.body.decode() for answer in answers})
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def statistics(self) -> LiveStatistics:
        """Return the figures of all workers together."""
        answers = await self._workers.ask_all("GET", "/statistics")
        parts = [msgspec.json.decode(answer.body, type=LiveStatistics) for answer in answers]
        return merged_statistics(parts, self._place.clients_port, self._place.listener.getsockname()[1])

    async def engines(self, _http: web.Request) -> web.Response:
        """Handle GET /admin/engines: return all engines."""
        answers = await self._workers.ask_all("GET", "/admin/engines")
        return _json({"engines": merged_engines(answer.content()["engines"] for answer in answers)})

    async def engine(self, http: web.Request) -> web.Response:
        """Handle GET /admin/engines/{name}: return one engine, or all ranks of an address."""
        answers = await self._workers.ask_all("GET", http.raw_path)
        found = [answer for answer in answers if answer.status == HTTPStatus.OK]
        if not found:
            return answers[0].response()
        shown = [answer.content() for answer in found]
        merged = merged_engines(each.get("engines", [each]) for each in shown)
        return _json(merged[0] if len(merged) == 1 else {"engines": merged})

    async def add(self, http: web.Request) -> web.Response:
        """Handle POST /admin/engines: add an engine in all workers."""
        async with self._bodies.holding(http) as held:
            body = bytes(held)
        try:
            url = url_to_add(body)
            change = OperatorChange(ChangeMade.ADD, EngineUrl.parse(url).name, url)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError):
            change = None  # the workers refuse it
        answer = await self._workers.change_all(http.method, http.raw_path, change, body)
        return answer.response()

    async def remove(self, http: web.Request) -> web.Response:
        """Handle DELETE /admin/engines/{name}: remove an engine from all workers."""
        return await self._change(http, ChangeMade.REMOVE)

    async def drain(self, http: web.Request) -> web.Response:
        """Handle POST /admin/engines/{name}/drain: drain an engine in all workers."""
        return await self._change(http, ChangeMade.DRAIN)

    async def resume(self, http: web.Request) -> web.Response:
        """Handle POST /admin/engines/{name}/resume: let all workers send an engine requests again."""
        return await self._change(http, ChangeMade.RESUME)

    async def _change(self, http: web.Request, made: ChangeMade) -> web.Response:
        change = OperatorChange(made, http.match_info["name"])
        return (await self._workers.change_all(http.method, http.raw_path, change)).response()

    async def explain(self, http: web.Request) -> web.Response:
        """Handle GET /admin/explain/{request_id}: return the answer of the worker that knows the request."""
        answers = await self._workers.ask_all("GET", http.raw_path)
        return min(answers, key=lambda answer: answer.status).response()

    async def decisions(self, http: web.Request) -> web.Response:
        """Handle GET /admin/decisions?limit=N: return the decisions for the newest requests."""
        limit = limit_in(http.query)
        answers = await self._workers.ask_all("GET", f"/admin/decisions?limit={limit}")
        return _json({"decisions": merged_decisions((each.content()["decisions"] for each in answers), limit)})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


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
        self._starts, self._changes = WorkerStarts(settings.front.workers), OperatorChanges()
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
            changes=self._changes,
            lifeline=self._lifeline,
            prompts=prompt_reader.words,
        )
        self._operators = _Process("the admin plane", lambda: serve_operators(settings, place))

    def _worker(self, settings: RouteSettings, prompt_reader: PromptReader, at: int) -> Callable[[], None]:
        place = WorkerPlace(self._lifeline, self._limits, self._starts, self._changes, at)
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
