"""The router's own transport of gRPC, held by gRPC's client: statuses, limits, watched health, large bodies."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import grpc.aio
import pytest
from endpoint_picker.pickers import (
    COMPLETION,
    OTHER,
    SERVICE,
    open_stream,
    request_headers,
    running_picker,
    with_processes,
)
from gateway.rig import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moestro.gateway.picker.ext_proc_pb2 import HttpBody, ProcessingRequest

pytestmark = pytest.mark.skipif(OTHER is not None, reason="it checks the transport of moestro route")


def code_of(port: int, message: bytes, path: str = f"/{SERVICE}/Process", **options: object) -> grpc.StatusCode:
    """Return the status of a call with one message, which is sent as it is.

    The client is that of threads: `grpc.aio` names a call INTERNAL whose status comes while it still sends.
    """
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(path)(iter([message]), **options)
        try:
            list(call)
        except grpc.RpcError as error:
            return error.code()
        return call.code()


@with_processes
async def test_calls_that_are_not_served_get_their_status(tmp_path):
    engine = FakeEngine("a")
    await engine.start()
    status = grpc.StatusCode
    body = ProcessingRequest(request_body=HttpBody(body=b"x", end_of_stream=True)).SerializeToString()
    try:
        async with running_picker([engine.port], tmp_path) as picker:
            calling = partial(asyncio.to_thread, code_of, picker.port)
            assert await calling(body) is status.INVALID_ARGUMENT  # the headers are missing
            assert await calling(b"\xff") is status.INTERNAL
            assert await calling(body, f"/{SERVICE}/Other") is status.UNIMPLEMENTED
            assert await calling(body, "/other.Service/Process") is status.UNIMPLEMENTED
            assert await calling(bytes(9 << 20)) is status.RESOURCE_EXHAUSTED
            packed = await calling(bytes(10_000), compression=grpc.Compression.Gzip)
            assert packed is status.UNIMPLEMENTED
            assert (await picker.pick()).endpoints  # the same picker goes on
            assert "Traceback" not in picker.text
    finally:
        engine.die()


@with_processes
async def test_a_watch_gets_each_change_of_readiness(tmp_path):
    engine = FakeEngine("a")
    await engine.start()
    statuses = health_pb2.HealthCheckResponse
    try:
        async with running_picker([engine.port], tmp_path) as picker, picker.channel() as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await call.read()).status == statuses.SERVING
            engine.die()
            async with asyncio.timeout(60):
                assert (await call.read()).status == statuses.NOT_SERVING
            unknown = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="other"))
            assert (await unknown.read()).status == statuses.SERVICE_UNKNOWN
    finally:
        engine.die()


@with_processes
async def test_large_bodies_of_many_streams_pass_a_small_window(tmp_path):
    """The client's windows are 64 KiB, and it reads each answer late."""
    engine = FakeEngine("a")
    await engine.start()
    options = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    try:
        async with (
            running_picker([engine.port], tmp_path) as picker,
            grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}", options=options) as channel,
        ):
            bodies = [b'{"model": "m", "prompt": "%b"}' % (b"%d" % at * 300_000) for at in range(8)]
            streams = [open_stream(channel) for _ in bodies]
            for stream, body in zip(streams, bodies, strict=True):
                await stream.headers()
                await stream.body(*(body[at : at + 60_000] for at in range(0, len(body), 60_000)))
            for stream, body in zip(streams, bodies, strict=True):
                picked = await stream.picked()
                assert picked.has_end
                assert b"".join(picked.body) == body
    finally:
        engine.die()


@with_processes
async def test_a_message_that_comes_while_a_prompt_is_read_is_answered_after_it(tmp_path):
    """Prompts of this size are read on a thread, and the proxy's own answer does not wait for the pick."""
    engine = FakeEngine("a")
    await engine.start()
    large = b'{"model": "m", "prompt": "%b"}' % (b"x" * 3_000_000)
    try:
        async with running_picker([engine.port], tmp_path) as picker, picker.channel() as channel:
            for body in (large, COMPLETION):
                stream = open_stream(channel)
                await stream.send(**request_headers())
                await stream.body(body)
                response = await stream.receive()
                assert response.WhichOneof("response") == "request_headers"
                back = b""
                while True:
                    piece = (await stream.receive()).request_body.response.body_mutation.streamed_response
                    back += piece.body
                    if piece.end_of_stream:
                        break
                assert back == body
                assert await stream.answers(b"{}") == b"{}"
            left = open_stream(channel)
            await left.send(**request_headers())
            await left.body(large)
            left.call.cancel()
            assert (await picker.pick()).endpoints
            assert "Traceback" not in picker.text
    finally:
        engine.die()
