"""A router on a real socket before fake engines, all in one event loop; the tests speak raw HTTP to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httptools
import uvloop

from moestro.gateway.admin import Admin
from moestro.gateway.app import RouterApp, assemble
from moestro.gateway.clients.request_body import PromptReader, text_prompt_reader
from moestro.gateway.clients.tokenized_blocks import tokenized_prompt_reader
from moestro.gateway.part_settings import DiscoverySettings, QueueSettings, RouterPeerSettings, ShadowSettings
from moestro.gateway.proxy import sweep_forever
from moestro.gateway.settings import (
    AdminSettings,
    EngineSettings,
    EngineUrl,
    FrontSettings,
    RecordSettings,
    ReliabilitySettings,
    RouteSettings,
    RoutingSettings,
)
from moestro.routing.settings import RoutePolicySettings
from moestro.web.ports.connections import Front, FrontLimits, bound_socket, http_front
from moestro.web.ports.faults import Faults, Port
from moestro.web.settings import AccessSettings, TracingSettings
from moestro.web.tracing import open_sink

CHAT = "/v1/chat/completions"
KEYS = ("key-0", "key-1", "key-2")  # of three clients that a router tells apart, and enough to open a breaker
GROUPS = {
    "engines": EngineSettings,
    "discovery": DiscoverySettings,
    "policy": RoutePolicySettings,
    "routing": RoutingSettings,
    "reliability": ReliabilitySettings,
    "front": FrontSettings,
    "queue": QueueSettings,
    "access": AccessSettings,
    "admin": AdminSettings,
    "record": RecordSettings,
    "tracing": TracingSettings,
    "peers": RouterPeerSettings,
    "shadow": ShadowSettings,
}
QUICK: dict[str, Any] = {"health_interval": 0.02, "metrics_interval": 0.0, "probe_timeout": 1.0, "slow_start": 0.0}


def looped(test: Callable[..., Awaitable[None]], seconds: float = 60) -> Callable[..., None]:
    """Run a test in an event loop of its own, for a minute at most."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), seconds))

    return run


def settings_of(**given: Any) -> RouteSettings:
    """Settings by flags' names, whatever group they belong to."""
    given = QUICK | given
    groups = {
        place: kind(**{name: given.pop(name) for name in list(given) if name in kind.__dataclass_fields__})
        for place, kind in GROUPS.items()
    }
    assert not given, f"no such setting: {given}"
    return RouteSettings(**groups)


@dataclass
class Received:
    """A request as an engine got it."""

    method: str = ""
    target: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known.lower() == name), None)


class Wire(asyncio.Protocol):
    """An engine's end of a connection."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.is_lost = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.engine.wires.append(self)

    def connection_lost(self, exc) -> None:
        self.is_lost.set()
        for task in self.tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.request = Received()

    def on_url(self, part: bytes) -> None:
        self.request.target += part.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.request.headers.append((name.decode(), value.decode("latin-1")))

    def on_body(self, part: bytes) -> None:
        self.request.body += part

    def on_message_complete(self) -> None:
        self.request.method = self.parser.get_method().decode()
        task = asyncio.get_running_loop().create_task(self.engine.answer(self, self.request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def reply(self, body: bytes = b"{}", status: int = 200, *, headers: str = "") -> None:
        self.write(
            f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"
            f"{headers}\r\n".encode()
            + body
        )

    def open_stream(self) -> None:
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.write(b"0\r\n\r\n")


Script = Callable[["FakeEngine", Wire, Received], Awaitable[None]]


async def say_ok(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.reply(json.dumps({"from": engine.name}).encode())


class FakeEngine:
    """An engine that does what its script says with everything but the router's own questions."""

    def __init__(self, name: str, script: Script = say_ok) -> None:
        self.name = name
        self.script = script
        self.received: list[Received] = []
        self.wires: list[Wire] = []
        self.health = 200
        self.models = ("m",)
        self.metrics: bytes | None = None

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.get_running_loop().create_server(lambda: Wire(self), "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]

    def die(self) -> None:
        """As by SIGKILL: no listener is left, and every connection is reset."""
        self.server.close()
        for wire in self.wires:
            wire.transport.abort()
        self.wires.clear()

    async def answer(self, wire: Wire, request: Received) -> None:
        if request.target.endswith("/health"):
            wire.reply(b"", self.health)
        elif request.target.endswith("/v1/models") and request.method == "GET":
            cards = [{"id": name, "object": "model", "owner": self.name} for name in self.models]
            wire.reply(json.dumps({"object": "list", "data": cards}).encode())
        elif request.target.endswith("/metrics"):
            wire.reply(self.metrics or b"", 200 if self.metrics is not None else 404)
        else:
            self.received.append(request)
            await self.script(self, wire, request)


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]


class Caller:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, path: str = CHAT, body: object = None, method: str = "POST", **headers: str) -> None:
        self.send(request_bytes(path, body, method, **headers))

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.rstrip("\r\n").split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def answer(self, *, is_head: bool = False) -> Answer:
        status, headers = await self.head()
        if is_head:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([piece async for piece in self.pieces()])
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Answer(status, headers, body)

    async def pieces(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        assert await self.reader.readexactly(2) == b"\r\n"

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def hang_up(self) -> None:
        self.writer.transport.abort()


def request_bytes(path: str = CHAT, body: object = None, method: str = "POST", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if data or method == "POST":
        lines.append(f"Content-Length: {len(data)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


class Rig:
    """A running router.

    Attributes:
        app: its inside.
        faults: what its clients did wrong.
    """

    def __init__(self, app: RouterApp, port: int, faults: Faults) -> None:
        self.faults = faults
        self.app = app
        self.port = port
        self.callers: list[Caller] = []

    async def caller(self, connected: socket.socket | None = None) -> Caller:
        """A new connection, or one that was made with options of its own."""
        if connected is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        else:
            reader, writer = await asyncio.open_connection(sock=connected, limit=1 << 16)
        self.callers.append(Caller(reader, writer))
        return self.callers[-1]

    async def call(self, path: str = CHAT, body: object = None, method: str = "POST", **headers: str) -> Answer:
        """One request on a connection of its own."""
        caller = await self.caller()
        caller.ask(path, {"messages": [{"role": "user", "content": "hi"}]} if body is None else body, method, **headers)
        answer = await caller.answer(is_head=method == "HEAD")
        caller.hang_up()
        return answer

    def engine(self, name: str):
        found = self.app.shared.fleet.named(name)
        assert found is not None
        return found

    @property
    def num_in_flight(self) -> int:
        return self.app.shared.fleet.router.num_in_flight

    @property
    def counts(self):
        return self.app.shared.counts

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("waited in vain")

    async def until_up(self, *names: str) -> None:
        await self.until(lambda: all(self.engine(name).condition == "up" for name in names))

    async def until_idle(self) -> None:
        await self.until(lambda: not self.num_in_flight and not self.app.shared.active)


def reading_of(routing: RoutingSettings) -> PromptReader:
    if routing.tokenizer is None:
        return text_prompt_reader(routing.text_block_bytes)
    return tokenized_prompt_reader(routing.tokenizer, routing.block_size)


@contextlib.asynccontextmanager
async def rig(
    *engines: FakeEngine, is_up: bool = True, listed: bool = False, peer_name: str | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """A router before `engines`, which are started, looked after and (if `is_up`) found to be well.

    `listed`: the engines are started already, and come from a list. `engine` has the addresses of further engines that
    the caller has started. `peer_name` is the router's name among others.
    """
    with contextlib.ExitStack() as started:
        for engine in engines:
            if not listed:
                await engine.start()
            started.callback(engine.die)
        own = () if listed else tuple(f"{engine.name}=http://127.0.0.1:{engine.port}" for engine in engines)
        urls, faults = settings.pop("engine", ()) + own, Faults()
        given = settings_of(engine=urls, **settings)
        async with open_sink(given.tracing, "moestro-route") as sink:
            app = assemble(given, reading_of(given.routing), faults, sink, peer_name)
            async with running(app, faults, urls, is_up=is_up) as made:
                yield made


@contextlib.asynccontextmanager
async def running(app: RouterApp, faults: Faults, urls: tuple[str, ...], *, is_up: bool) -> AsyncIterator[Rig]:
    """A router on a socket, before the engines of `urls` and of its lists."""
    listener: socket.socket = bound_socket("127.0.0.1", 0)
    door = Front(Port.CLIENTS, listener, app.clients, app.front_limits, faults).open()
    for url in urls:
        app.engine_admin.add(EngineUrl.parse(url))
    sweeper = asyncio.create_task(sweep_forever(app.shared, app.clients, 0.01))
    made = Rig(app, listener.getsockname()[1], faults)
    try:
        async with app.discovery.running(5.0), app.shadow.running() if app.shadow else contextlib.nullcontext():
            if is_up:
                await made.until(lambda: all(engine.condition == "up" for engine in app.shared.fleet))
            yield made
            for caller in made.callers:
                caller.hang_up()
            await made.until_idle()  # whatever happened, nothing is left counted
            assert app.clients.memory.num_bytes == 0
    finally:
        sweeper.cancel()
        door.close()
        listener.close()
        app.clients.close()
        for caller in made.callers:
            caller.hang_up()
        await app.engine_admin.watch.close()
        app.threads.close()
        for address in app.shared.fleet.addresses:
            address.pool.close()


@contextlib.asynccontextmanager
async def admin_of(it: Rig, **settings: object) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the router's admin plane."""
    listener = bound_socket("127.0.0.1", 0)
    admin = Admin(it.app.engine_admin, it.app.shared.decision_log, it.app.exposition.text, it.app.statistics.read)
    runner = await admin.runner(AdminSettings(**settings), it.faults)
    door = http_front(Port.OPERATORS, runner, listener, FrontLimits(16), it.faults).open()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as session:
            yield session
    finally:
        door.close()
        await runner.cleanup()
        listener.close()
