"""A picker as its tests know it: a command, an address, and the messages of a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from gateway.rig import looped
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.forker import ForkedProgram
from support.running import MOESTRO, PATIENCE_S, free_port, start_process

from moestro.gateway.picker.ext_proc_pb2 import (
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    Metadata,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET, SERVED = f"{DESTINATION}-subset", f"{DESTINATION}-served"
# Command of the picker under test; {port} is its gRPC port, {endpoints} its engines.
OTHER = os.environ.get("MOESTRO_TEST_PICKER")
COMPLETION = b'{"model": "m", "prompt": "Once upon a time"}'
# Runs a test that starts processes, which take long on a busy machine.
with_processes = functools.partial(looped, seconds=2 * PATIENCE_S)
FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED


@dataclass
class Picked:
    """What a picker has decided about a request."""

    header: str = ""
    metadata: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)
    has_end: bool = False
    has_trailers: bool = False
    status: int = 0  # of an immediate response; 0 means that the request goes on
    text: str = ""

    @property
    def endpoints(self) -> list[str]:
        return self.header.split(",")


class Stream:
    """One HTTP request, as a proxy tells a picker about it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._received: asyncio.Queue[ProcessingResponse | Exception | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Read all the time, as a proxy does: a picker may refuse a request whose body is still being sent."""
        try:
            while (response := await self.call.read()) is not grpc.aio.EOF:
                self._received.put_nowait(response)
            self._received.put_nowait(None)
        except Exception as error:
            self._received.put_nowait(error)

    async def send(self, **fields: Any) -> None:
        # A picker that has refused the request reads no more; what it has sent shows that.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self.call.write(ProcessingRequest(**fields))

    async def receive(self) -> ProcessingResponse | None:
        """The next response; None at the end of the stream."""
        async with asyncio.timeout(PATIENCE_S):
            found = await self._received.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def headers(self, *, has_body: bool = True, **context: Any) -> None:
        await self.send(**request_headers(has_body=has_body, **context))

    async def body(self, *pieces: bytes, ends: bool = True) -> None:
        for at, piece in enumerate(pieces):
            await self.send(request_body=HttpBody(body=piece, end_of_stream=ends and at == len(pieces) - 1))

    async def picked(self) -> Picked:
        """Everything up to the end of the request's body, or up to the refusal."""
        found = Picked()
        while (response := await self.receive()) is not None:
            kind = response.WhichOneof("response")
            if kind == "immediate_response":
                found.status = response.immediate_response.status.code
                found.text = response.immediate_response.body.decode()
                found.headers = fields_of(response.immediate_response.headers.set_headers)
                return found
            if kind == "request_headers":
                mutation = response.request_headers.response.header_mutation
                found.headers = fields_of(mutation.set_headers)
                found.removed = list(mutation.remove_headers)
                found.header = found.headers.get(DESTINATION, "")
                metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value
                found.metadata = metadata.fields[DESTINATION].string_value
                if not self.has_body:
                    return found
            elif kind == "request_body":
                piece = response.request_body.response.body_mutation.streamed_response
                found.body.append(piece.body)
                found.has_end |= piece.end_of_stream
                if piece.end_of_stream:
                    return found
            elif kind == "request_trailers":
                found.has_trailers = True
                return found
        return found

    has_body = True

    async def answers(
        self, *pieces: bytes, served: str = "", status: int = 200, kind: str = "application/json"
    ) -> bytes:
        """Pass an answer of an engine through, one piece after the other, and return what comes back."""
        metadata = {"envoy.lb": {SERVED: served}} if served else {}
        head = http_headers({":status": str(status), "content-type": kind}, end=not pieces)
        await self.send(response_headers=head, metadata_context=metadata_of(metadata))
        assert (await self.receive()).WhichOneof("response") == "response_headers"
        back = b""
        for at, piece in enumerate(pieces):
            await self.send(response_body=HttpBody(body=piece, end_of_stream=at == len(pieces) - 1))
            response = await self.receive()
            streamed = response.response_body.response.body_mutation.streamed_response
            assert streamed.end_of_stream == (at == len(pieces) - 1)
            back += streamed.body
        return back


class Picker:
    """A running picker."""

    def __init__(
        self, process: subprocess.Popen[bytes] | ForkedProgram, port: int, log: Path, admin_port: int, http_port: int
    ) -> None:
        self.process, self.port, self.log = process, port, log
        self.admin_port, self.http_port = admin_port, http_port

    @property
    def text(self) -> str:
        return self.log.read_text()

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield channel

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        async with self.channel() as channel:
            yield open_stream(channel)

    async def pick(self, body: bytes = COMPLETION, **context: Any) -> Picked:
        """The decision for one request, which ends there."""
        async with self.stream() as stream:
            await stream.headers(**context)
            await stream.body(body)
            return await stream.picked()

    async def health(self, name: str) -> str:
        async with self.channel() as channel:
            return await health_of(channel, name)

    async def until(self, name: str, status: str) -> None:
        """Wait until a health name has a status."""
        deadline = time.monotonic() + PATIENCE_S
        found = ""
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (found := await self.health(name)) == status:
                    return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{name} is {found or 'silent'}, not {status}:\n{self.text}")

    async def ended(self) -> int:
        """The exit status, once the process has ended."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


def open_stream(channel: grpc.aio.Channel) -> Stream:
    method = channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    return Stream(method())


async def health_of(channel: grpc.aio.Channel, name: str) -> str:
    checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(checked.status)


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes] | ForkedProgram:
    with log.open("wb") as out:
        return start_process(command, out.fileno(), os.environ | {"COLUMNS": "120"})


@contextlib.asynccontextmanager
async def running_picker(
    engines: Iterable[int], directory: Path, *flags: str, is_ready: bool = True
) -> AsyncIterator[Picker]:
    """A picker before engines at these ports, which has found them to be well if `is_ready`."""
    port, admin_port, http_port = free_port(), free_port(), free_port()
    endpoints = [f"127.0.0.1:{each}" for each in engines]
    if OTHER:
        command = shlex.split(OTHER.format(port=port, endpoints=",".join(endpoints)))
    else:
        command = [MOESTRO, "route", "--ext-proc", str(port), "--port", str(http_port)]
        command += ["--admin-port", str(admin_port), "--health-interval", "0.2", "--metrics-interval", "0"]
        for endpoint in endpoints:
            command += ["--engine", f"http://{endpoint}"]
    log = directory / f"picker-{port}.log"
    process = start([*command, *flags], log)
    picker = Picker(process, port, log, admin_port, http_port)
    try:
        if "--ext-proc-ssl-certfile" not in flags:
            await picker.until("readiness" if is_ready else "liveness", "SERVING")
        yield picker
    finally:
        process.kill()
        process.wait()


def request_headers(
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    has_body: bool = True,
    headers: Sequence[tuple[str, str]] = (),
    subset: Any = None,
    client: str = "192.0.2.7:40000",
    mode: int = FULL_DUPLEX,
) -> dict[str, Any]:
    """The fields of a proxy's first message."""
    pairs = {":method": method, ":path": path, ":authority": "models.example", "content-type": "application/json"}
    attributes = Struct()
    attributes.update({"source.address": client})
    metadata = {} if subset is None else {"envoy.lb.subset_hint": {SUBSET: subset}}
    return {
        "request_headers": http_headers(pairs, headers, end=not has_body),
        "metadata_context": metadata_of(metadata),
        "attributes": {"envoy.filters.http.ext_proc": attributes},
        "protocol_config": ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
    }


def http_headers(pairs: dict[str, str], more: Sequence[tuple[str, str]] = (), *, end: bool) -> HttpHeaders:
    values = [HeaderValue(key=name, raw_value=value.encode()) for name, value in [*pairs.items(), *more]]
    return HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=end)


def trailers() -> HttpTrailers:
    return HttpTrailers(trailers=HeaderMap(headers=[HeaderValue(key="x-checksum", raw_value=b"1")]))


def metadata_of(namespaces: dict[str, dict[str, Any]]) -> Metadata:
    metadata = Metadata()
    for namespace, values in namespaces.items():
        metadata.filter_metadata[namespace].update(values)
    return metadata


def fields_of(options: Iterable[Any]) -> dict[str, str]:
    return {each.header.key: (each.header.raw_value or each.header.value.encode()).decode() for each in options}
