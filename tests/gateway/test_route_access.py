"""Keys, limits and CORS of `moestro route`."""

from __future__ import annotations

import asyncio

import pytest
from gateway.rig import CHAT, FakeEngine, Received, Wire, looped, rig

PAGE = "https://chat.example"
PREFLIGHT = {"Origin": PAGE, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}


@looped
async def test_a_key_in_either_header_opens_and_stays_here():
    engine = FakeEngine("e")
    async with rig(engine, api_key=("k1", "k2")) as it:
        for given in ({"x_api_key": "k1"}, {"X_Api_Key": "k1", "Authorization": "Bearer k1"}):
            for _ in range(2):  # the second head is known
                assert (await it.call(**given)).status == 200
        assert {request.header("x-api-key") for request in engine.received} == {None}
        assert {request.header("authorization") for request in engine.received} == {None}
        for given in ({"x_api_key": "wrong"}, {"X_Api_Key": "k1", "Authorization": "Bearer k2"}):
            assert (await it.call(**given)).status == 401


@pytest.mark.parametrize(("key", "handed_on"), [(None, "mine"), ("e1", None)])
@looped
async def test_a_router_without_keys_hands_on_a_key_unless_the_engine_has_its_own(key, handed_on):
    engine = FakeEngine("e")
    async with rig(engine, engine_api_key=key) as it:
        await it.call(X_Api_Key="mine")
        assert engine.received[0].header("x-api-key") == handed_on
        assert engine.received[0].header("authorization") == (None if key is None else "Bearer e1")


@pytest.mark.parametrize("keys", [(), ("k1", "k2")])
@pytest.mark.parametrize("key", [None, "e1"])
@looped
async def test_a_router_names_its_clients_to_engines_with_its_key_and_no_client_names_itself(key, keys):
    engine = FakeEngine("e")
    async with rig(engine, engine_api_key=key, api_key=keys) as it:
        for name in ("evil", "evil", "127.0.0.9"):
            await it.call(**({"X_Api_Key": "k2"} if keys else {}), X_Moestro_Client=name)
        names = {request.header("x-moestro-client") for request in engine.received}
        assert len(engine.received) == 3
        assert names == {None if key is None else "1" if keys else "127.0.0.1"}


@looped
async def test_the_requests_of_each_key_are_limited():
    engine = FakeEngine("e")
    async with rig(engine, api_key=("k1", "k2"), max_requests_per_minute_per_key=3) as it:
        assert [(await it.call(X_Api_Key="k1")).status for _ in range(4)] == [200, 200, 200, 429]
        refused = await it.call(X_Api_Key="k1")
        assert refused.code == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert (await it.call(X_Api_Key="k2")).status == 200
        assert (await it.call("/health", method="GET")).status == 200
        assert (await it.call("/metrics", method="GET", X_Api_Key="k1")).status == 200
        assert len(engine.received) == 4
        assert it.counts.refusals["rate_limit_exceeded"] == 2


@looped
async def test_the_requests_and_connections_of_each_address_are_limited():
    async with rig(FakeEngine("e"), max_requests_per_minute_per_address=2, max_connections_per_address=2) as it:
        first, second = await it.caller(), await it.caller()
        third = await it.caller()
        refused = await third.answer()
        assert (refused.status, refused.code) == (503, "too_many_connections")
        for caller, status in ((first, 200), (second, 200), (first, 429)):
            caller.ask(body={})
            assert (await caller.answer()).status == status
        first.hang_up()
        second.hang_up()
        await it.until(lambda: not it.app.clients.open)
        assert (await it.call()).status == 429


@pytest.mark.parametrize("ending", ["answer", "leave"])
@looped
async def test_what_a_key_has_at_a_time_is_limited_and_freed_however_it_ends(ending):
    go_on = asyncio.Event()

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await go_on.wait()
        wire.reply()

    async with rig(FakeEngine("e", script), api_key=("k1", "k2"), max_concurrent_requests_per_key=1) as it:
        running = await it.caller()
        running.ask(body={}, X_Api_Key="k1")
        await it.until(lambda: it.num_in_flight == 1)
        refused = await it.call(X_Api_Key="k1")
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "rate_limit_exceeded", "1")
        if ending == "leave":
            running.hang_up()
            await it.until_idle()
        go_on.set()
        if ending == "answer":
            assert (await running.answer()).status == 200
        assert (await it.call(X_Api_Key="k1")).status == 200


@looped
async def test_a_preflight_is_answered_here_and_every_answer_has_the_headers():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        assert request.header("origin") is None  # an engine would answer CORS too
        wire.open_stream()
        wire.chunk(b"data: [DONE]\n\n")
        wire.end_stream()

    engine = FakeEngine("e", script)
    async with rig(engine, api_key=("k1",), allowed_origins=(PAGE,)) as it:
        answer = await it.call(method="OPTIONS", body=b"", **PREFLIGHT)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert answer.headers["access-control-allow-headers"] == "authorization"
        refused = await it.call(method="OPTIONS", body=b"", **PREFLIGHT | {"Origin": "https://evil.example"})
        assert (refused.status, refused.code) == (400, "cors_not_allowed")
        assert not engine.received
        for _ in range(2):
            answer = await it.call(Origin=PAGE, X_Api_Key="k1")
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert (await it.call("/nothing", Origin=PAGE, X_Api_Key="k1")).headers["access-control-allow-origin"] == PAGE
        other = await it.call(Origin="https://evil.example", X_Api_Key="k1")
        assert "access-control-allow-origin" not in other.headers
        assert other.headers["vary"] == "Origin"
        refused = await it.call(**PREFLIGHT)  # no preflight, for it is a POST
        assert (refused.status, refused.code) == (401, "invalid_api_key")


@looped
async def test_a_refusal_before_the_body_is_read_has_the_headers_too():
    async with rig(FakeEngine("e"), api_key=("k1",), allowed_origins=("*",)) as it:
        refused = await it.call(Origin=PAGE, X_Api_Key="wrong")
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "*")


@looped
async def test_without_the_flag_cors_is_the_engines_affair():
    engine = FakeEngine("e")
    async with rig(engine) as it:
        answer = await it.call(CHAT, method="OPTIONS", **PREFLIGHT)
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert (await it.call(Origin=PAGE)).status == 200
        assert engine.received[-1].header("origin") == PAGE
