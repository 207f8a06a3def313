"""Each MUST of the endpoint picker protocol 1.0.0, held by a test that plays the proxy.

The tests know a picker by its address and its command line alone; docs/envoy.md shows how to hold another one to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from endpoint_picker.pickers import (
    COMPLETION,
    OTHER,
    SERVICE,
    Picker,
    Stream,
    health_of,
    http_headers,
    open_stream,
    running_picker,
    trailers,
    with_processes,
)
from gateway.rig import FakeEngine

from moestro.gateway.picker.ext_proc_pb2 import HttpBody


@contextlib.asynccontextmanager
async def engines_and_picker(
    directory: Path, *flags: str, num_engines: int = 2, is_ready: bool = True
) -> AsyncIterator[tuple[list[FakeEngine], Picker]]:
    engines = [FakeEngine(f"engine-{number}") for number in range(num_engines)]
    for engine in engines:
        await engine.start()
    try:
        async with running_picker((engine.port for engine in engines), directory, *flags, is_ready=is_ready) as picker:
            yield engines, picker
    finally:
        for engine in engines:
            engine.die()


def endpoint(engine: FakeEngine) -> str:
    return f"127.0.0.1:{engine.port}"


# --- the destination


@with_processes
async def test_header_and_metadata_name_the_same_endpoints_of_the_pool(tmp_path):
    async with engines_and_picker(tmp_path) as (engines, picker):
        picked = await picker.pick()
        assert picked.header
        assert picked.header == picked.metadata
        assert set(picked.endpoints) <= {endpoint(engine) for engine in engines}
        assert len(set(picked.endpoints)) == len(picked.endpoints)


@with_processes
async def test_a_request_without_a_body_gets_an_endpoint_at_its_headers(tmp_path):
    async with engines_and_picker(tmp_path) as (engines, picker), picker.stream() as stream:
        stream.has_body = False
        await stream.headers(path="/get_model_info", method="GET", has_body=False)
        picked = await stream.picked()
        assert picked.endpoints[0] in {endpoint(engine) for engine in engines}


@with_processes
async def test_a_clients_own_destination_header_never_decides(tmp_path):
    async with engines_and_picker(tmp_path) as (engines, picker):
        lies = [("x-gateway-destination-endpoint", "192.0.2.1:80")] * 2
        lies += [("x-gateway-destination-endpoint-subset", "192.0.2.1:80")]
        lies += [("x-gateway-destination-endpoint-served", "192.0.2.1:80")]
        picked = await picker.pick(headers=lies)
        assert picked.header == picked.metadata
        assert set(picked.endpoints) <= {endpoint(engine) for engine in engines}


@with_processes
async def test_without_a_ready_endpoint_the_answer_is_503(tmp_path):
    async with engines_and_picker(tmp_path, num_engines=1) as ([engine], picker):
        engine.die()
        await picker.until("readiness", "NOT_SERVING")
        picked = await picker.pick()
        assert picked.status == 503


@with_processes
@pytest.mark.skipif(OTHER is not None, reason="each picker has its own flags for what it sheds")
async def test_a_request_to_be_shed_is_429(tmp_path):
    flags = ("--max-requests-per-minute-per-address", "2")
    async with engines_and_picker(tmp_path, *flags) as (_, picker):
        statuses = [(await picker.pick()).status for _ in range(4)]
        assert statuses == [0, 0, 429, 429]
        assert (await picker.pick(client="192.0.2.8:1")).status == 0  # another client's share is its own


# --- the subset hint


@with_processes
async def test_a_subset_hint_bounds_every_choice_and_every_fallback(tmp_path):
    async with engines_and_picker(tmp_path, num_engines=4) as (engines, picker):
        for size in (1, 2, 3):
            allowed = {endpoint(engine) for engine in engines[:size]}
            for _ in range(6):
                picked = await picker.pick(subset=sorted(allowed))
                assert set(picked.endpoints) <= allowed
                assert picked.header == picked.metadata


@with_processes
async def test_a_subset_without_an_eligible_endpoint_is_503(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker):
        for subset in ([], ["192.0.2.1:80"], "", "192.0.2.1:80", 7, {"a": "b"}, [None, 1], [""], [["a"]], False):
            picked = await picker.pick(subset=subset)
            assert picked.status == 503, subset
            assert not picked.header


@with_processes
async def test_an_endpoint_outside_the_pool_is_never_picked_although_the_hint_names_it(tmp_path):
    async with engines_and_picker(tmp_path) as (engines, picker):
        picked = await picker.pick(subset=["192.0.2.1:80", endpoint(engines[1]), "localhost:1"])
        assert picked.endpoints == [endpoint(engines[1])]


@with_processes
async def test_a_hinted_endpoint_that_is_not_ready_is_not_picked(tmp_path):
    async with engines_and_picker(tmp_path) as (engines, picker):
        engines[0].die()
        for _ in range(500):
            if (picked := await picker.pick(subset=[endpoint(engines[0])])).status:
                break
            await asyncio.sleep(0.02)
        assert picked.status == 503


# --- bodies, full duplex


@with_processes
async def test_a_body_comes_back_unchanged_in_order_with_one_end(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker):
        for size in (1, 2_400, 400_000):
            body = b'{"model": "m", "prompt": "%b"}' % bytes(97 + at % 26 for at in range(size))
            pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
            async with picker.stream() as stream:
                await stream.headers()
                await stream.body(*pieces)
                picked = await stream.picked()
            assert b"".join(picked.body) == body
            assert picked.has_end


@with_processes
async def test_the_end_of_a_body_may_be_a_message_of_its_own(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker), picker.stream() as stream:
        await stream.headers()
        await stream.body(COMPLETION, b"")
        picked = await stream.picked()
        assert b"".join(picked.body) == COMPLETION
        assert picked.has_end


@with_processes
async def test_trailers_of_a_request_end_its_body(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker), picker.stream() as stream:
        await stream.headers()
        await stream.body(COMPLETION, ends=False)
        await stream.send(request_trailers=trailers())
        picked = await stream.picked()
        assert picked.has_trailers
        assert not picked.has_end
        assert b"".join(picked.body) == COMPLETION


@with_processes
async def test_each_piece_of_an_answer_comes_back_before_the_next_is_sent(tmp_path):
    events = [b"data: {}\n\n"] * 20 + [b"data: [DONE]\n\n"]
    async with engines_and_picker(tmp_path) as (_, picker), picker.stream() as stream:
        await stream.headers()
        await stream.body(COMPLETION)
        picked = await stream.picked()
        back = await stream.answers(*events, served=picked.endpoints[0], kind="text/event-stream")
        assert back == b"".join(events)


@with_processes
async def test_trailers_of_an_answer_are_answered(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker), picker.stream() as stream:
        await stream.headers()
        await stream.body(COMPLETION)
        await stream.picked()
        head = {":status": "200", "content-type": "text/plain"}
        await stream.send(response_headers=http_headers(head, end=False))
        assert (await stream.receive()).WhichOneof("response") == "response_headers"
        await stream.send(response_trailers=trailers())
        assert (await stream.receive()).WhichOneof("response") == "response_trailers"


@with_processes
async def test_hundred_exchanges_at_once_do_not_mix(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker), picker.channel() as channel:

        async def one(number: int) -> bool:
            body = b'{"model": "m", "prompt": "%d"}' % number
            stream = open_stream(channel)
            await stream.headers()
            await asyncio.sleep(0)
            await stream.body(body[:9], body[9:])
            picked = await stream.picked()
            answer = b'{"number": %d}' % number
            return b"".join(picked.body) == body and await stream.answers(answer, served=picked.endpoints[0]) == answer

        assert all(await asyncio.gather(*(one(number) for number in range(100))))


@with_processes
async def test_an_answer_of_the_proxy_itself_passes_in_every_phase(tmp_path):
    """A proxy that refuses a request itself shows its answer: before the headers, in the body, after the pick."""
    async with engines_and_picker(tmp_path) as (_, picker):
        for num_messages in range(4):
            async with picker.stream() as stream:
                if num_messages > 0:
                    await stream.headers()
                if num_messages > 1:
                    await stream.body(COMPLETION, ends=num_messages > 2)
                if num_messages > 2:
                    await stream.picked()
                assert await stream.answers(b"no", status=400) == b"no"


# --- the endpoint that has served


@with_processes
async def test_a_served_endpoint_further_down_the_list_is_accepted(tmp_path):
    async with engines_and_picker(tmp_path, num_engines=3) as (engines, picker):
        for served in (*(endpoint(engine) for engine in engines), "192.0.2.1:80", "nonsense", ""):
            async with picker.stream() as stream:
                await stream.headers()
                await stream.body(COMPLETION)
                await stream.picked()
                assert await stream.answers(b"{}", served=served) == b"{}"


# --- health


@with_processes
async def test_a_ready_picker_serves_under_each_health_name_and_no_other(tmp_path):
    async with engines_and_picker(tmp_path, num_engines=1) as (_, picker):
        for name in ("liveness", "readiness", SERVICE):
            assert await picker.health(name) == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await picker.health("engine")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@with_processes
async def test_a_picker_that_knows_no_ready_endpoint_yet_lives_and_is_not_ready(tmp_path):
    engine = FakeEngine("engine")
    engine.health = 503
    await engine.start()
    try:
        async with running_picker([engine.port], tmp_path, is_ready=False) as picker:
            assert await picker.health("liveness") == "SERVING"
            assert await picker.health("readiness") == await picker.health(SERVICE) == "NOT_SERVING"
            engine.health = 200
            await picker.until("readiness", "SERVING")
            assert await picker.health(SERVICE) == "SERVING"
    finally:
        engine.die()


# --- the end of the picker


@with_processes
async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker), picker.channel() as channel:
        stream = open_stream(channel)
        await stream.headers()
        await stream.body(COMPLETION)
        picked = await stream.picked()
        picker.process.send_signal(signal.SIGTERM)
        for name in ("readiness", SERVICE):
            for _ in range(500):
                if (found := await health_of(channel, name)) == "NOT_SERVING":
                    break
                await asyncio.sleep(0.02)
            assert found == "NOT_SERVING"
        assert await health_of(channel, "liveness") == "SERVING"
        late = open_stream(channel)
        await late.headers()
        assert (await late.picked()).status == 503
        assert await stream.answers(b"{}", b"", served=picked.endpoints[0]) == b"{}"
        assert await picker.ended() == 0


# --- what no proxy should send


@with_processes
async def test_streams_that_end_early_in_any_phase_leave_the_picker_well(tmp_path):
    async with engines_and_picker(tmp_path) as (_, picker), picker.channel() as channel:
        for phase in ("headers", "half a body", "picked", "an answer's head", "half an answer") * 8:
            stream = open_stream(channel)
            await stream.headers()
            if phase != "headers":
                await stream.body(COMPLETION, ends=phase != "half a body")
            if phase not in ("headers", "half a body"):
                await stream.picked()
            if phase == "an answer's head":
                await stream.send(response_headers=http_headers({":status": "200"}, end=False))
            elif phase == "half an answer":
                await half_an_answer(stream)
            stream.call.cancel()
        spread = Counter([(await picker.pick(b'{"prompt": "%d"}' % at)).endpoints[0] for at in range(8)])
        assert len(spread) == 2  # nothing that ended counts as load


async def half_an_answer(stream: Stream) -> None:
    await stream.send(response_headers=http_headers({":status": "200"}, end=False))
    await stream.receive()
    await stream.send(response_body=HttpBody(body=b"data: {}\n\n"))
    await stream.receive()
