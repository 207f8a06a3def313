"""A standby takes over what another router knows of caches."""

from __future__ import annotations

import json

import msgspec
from serve.route.rig import FakeEngine, looped, rig
from serve.route.test_doors import admin_of

TEXT = "one router has seen this, the other has not; " * 60
BODY = json.dumps({"messages": [{"role": "user", "content": TEXT}]}).encode()


@looped
async def test_a_router_that_takes_an_index_sends_a_conversation_where_it_was_before():
    engines = [FakeEngine(name) for name in "abcdef"]
    async with rig(*engines, route_policy="lmetric") as it, admin_of(it) as admin:
        router, fleet = it.parts.shared.fleet.router, it.parts.shared.fleet
        chosen = (await it.call(body=BODY)).headers["x-moestro-engine"]
        index = await (await admin.get("/admin/index")).read()
        for engine in fleet:  # as if it had never seen them
            router.engine_lost(engine.row, 1)
            assert router.prompts_sent(engine.row) == []
        taken = await admin.put("/admin/index", data=index)
        assert (taken.status, await taken.json()) == (200, {"prompts": 1})
        assert await (await admin.get("/admin/index")).read() == index
        for _ in range(4):
            assert (await it.call(body=BODY)).headers["x-moestro-engine"] == chosen


@looped
async def test_engines_that_are_not_here_are_passed_over():
    async with rig(FakeEngine("a")) as it, admin_of(it) as admin:
        index = msgspec.msgpack.decode(await (await admin.get("/admin/index")).read())
        index["prompts"] = {"http://elsewhere:1": [bytes(16)]}
        taken = await admin.put("/admin/index", data=msgspec.msgpack.encode(index))
        assert await taken.json() == {"prompts": 0}


@looped
async def test_what_is_no_index_or_one_in_other_blocks_is_refused():
    async with rig(FakeEngine("a")) as it, admin_of(it) as admin:
        index = msgspec.msgpack.decode(await (await admin.get("/admin/index")).read())
        other = index | {"reading": "as text, in blocks of 7 bytes"}
        short = index | {"prompts": {"http://a": [b"short"]}}
        for data, status, words in (
            (b"", 400, "no index of another router"),
            (b"hello", 400, "no index of another router"),
            (msgspec.msgpack.encode(short), 400, "no whole number of blocks"),
            (msgspec.msgpack.encode(other), 409, "in blocks of 7 bytes"),
        ):
            refused = await admin.put("/admin/index", data=data)
            assert refused.status == status
            assert words in await refused.text()
