"""Routers that reach themselves: the first return is refused, and the engine that leads there is taken out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from gateway.rig import FakeEngine, Received, Rig, Wire, looped, rig

from moestro.gateway.clients.http_headers import LOOP_HEADER
from moestro.gateway.settings import EngineUrl


def add(it: Rig, name: str, to: Rig) -> None:
    it.app.engine_admin.add(EngineUrl.parse(f"{name}=http://127.0.0.1:{to.port}"))


def name_of(it: Rig) -> str:
    return it.app.shared.fleet.pseudonym.decode()


@contextlib.asynccontextmanager
async def circle(num: int, *engines: FakeEngine) -> AsyncIterator[list[Rig]]:
    """Routers of which each has the next one as its engine; the first has `engines` too."""
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(rig(*(engines if i == 0 else ()))) for i in range(num)]
        for i, it in enumerate(made):
            add(it, "next", made[(i + 1) % num])
        yield made


@contextlib.asynccontextmanager
async def closed_circle(num: int) -> AsyncIterator[list[Rig]]:
    """A circle whose last engine has left: its routers find each other healthy, as they did before."""
    async with circle(num, FakeEngine("e")) as routers:
        await routers[0].until_up("e")
        for it in routers:
            await it.until_up("next")
        routers[0].app.engine_admin.remove(routers[0].engine("e").address)
        yield routers


@looped
async def test_a_router_finds_out_by_its_first_check_that_an_engine_is_itself():
    async with circle(1) as [it]:
        await it.until(lambda: it.engine("next").condition == "loop")
        assert "leads back to this router" in it.engine("next").unreachable
        answer = await it.call()
        assert (answer.status, answer.code) == (503, "no_engine")
        assert it.engine("next").counts.num_decisions == 0


@pytest.mark.parametrize("num", [2, 3])
@looped
async def test_a_request_that_comes_back_by_way_of_others_is_refused_once(num):
    async with closed_circle(num) as routers:
        first = routers[0]
        answer = await first.call()
        assert (answer.status, answer.code) == (508, "loop_detected")
        assert name_of(first) in answer.json["error"]["message"]
        assert answer.headers[LOOP_HEADER.decode()] == name_of(first)
        assert [it.engine("next").counts.num_decisions for it in routers] == [1] * num
        assert first.engine("next").condition == "loop"
        assert {it.engine("next").condition for it in routers[1:]} == {"up"}
        assert (await first.call()).code == "no_engine"
        assert first.counts.refusals["loop_detected"] == first.engine("next").counts.num_loops == 1
        text = (await first.call("/metrics", method="GET")).body.decode()
        assert 'moestro:route_loops_total{engine="next"} 1.0' in text
        assert 'moestro:route_engine_condition{condition="loop",engine="next"} 1.0' in text


@looped
async def test_a_request_that_comes_back_goes_to_another_engine():
    async with circle(2, FakeEngine("e")) as [first, second]:
        await first.until_up("next", "e")
        await second.until_up("next")
        statuses = {(await first.call()).status for _ in range(10)}
        assert statuses == {200}
        assert first.engine("next").counts.num_decisions <= 1


@looped
async def test_an_engine_returns_once_a_check_through_it_finds_no_loop():
    async with closed_circle(2) as [first, second], rig(FakeEngine("e")) as last:
        assert (await first.call()).status == 508
        num_checks = second.engine("next").counts.num_decisions
        first.engine("next").health._loop_until_ns = 0
        await first.until(lambda: second.engine("next").counts.num_decisions > num_checks)
        assert first.engine("next").condition == "loop", "the check came back"
        second.app.engine_admin.remove(second.engine("next").address)
        add(second, "last", last)
        await second.until_up("last")
        first.engine("next").health._loop_until_ns = 0
        await first.until_up("next")
        assert (await first.call()).status == 200


@looped
async def test_what_a_router_reads_of_itself_does_not_multiply():
    async with rig(metrics_interval=0.02) as it:
        add(it, "self", it)
        await it.until(lambda: it.engine("self").counts.num_loops > 5)
        assert it.counts.num_requests == 0
        loops, refusals = it.engine("self").counts.num_loops, it.counts.refusals["loop_detected"]
        assert refusals <= 3 * loops + 3, "each health check, and each read of /metrics, is refused once"


@looped
async def test_a_request_that_comes_back_without_a_key_is_refused_as_a_loop_too():
    async with rig(FakeEngine("e"), api_key=("key",)) as it:
        assert (await it.call(Via=f"1.1 {name_of(it)}")).status == 508
        assert (await it.call(Via="1.1 other")).status == 401


@pytest.mark.parametrize("via", ["1.1 moestro-0123456789abcdef", "1.1 moestro", "x, y (z), 1.0 proxy:80"])
@looped
async def test_a_forged_via_changes_nothing_and_is_passed_on(via):
    engine = FakeEngine("e")
    async with rig(engine) as it:
        assert (await it.call(Via=via)).status == 200
        values = [value for name, value in engine.received[0].headers if name.lower() == "via"]
        assert values == [via, f"1.1 {name_of(it)}"]


@looped
async def test_a_client_that_knows_the_pseudonym_refuses_itself_only():
    async with rig(FakeEngine("e")) as it:
        for via in (f"1.1 {name_of(it)}", f"1.1 a, 1.1 {name_of(it)} (x), 1.1 b"):
            assert (await it.call(Via=via)).status == 508
            assert (await it.call("/health", method="GET", Via=via)).status == 508
        assert it.engine("e").condition == "up"
        assert (await it.call()).status == 200


@pytest.mark.parametrize("header", ["", "x-moestro-loop: moestro-0123456789abcdef\r\n", "x-moestro-loop: \r\n"])
@looped
async def test_a_508_without_this_routers_name_is_just_an_answer(header):
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(b"loop", 508, headers=header)

    async with rig(FakeEngine("e", script)) as it:
        for _ in range(5):
            answer = await it.call()
            assert (answer.status, answer.body) == (508, b"loop")
        assert it.engine("e").condition == "up"
        assert it.engine("e").counts.num_loops == 0
