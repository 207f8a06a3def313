"""A standby takes over what another router knows of caches."""

from __future__ import annotations

import asyncio
import io
import json
import random

import msgspec
import pytest
from gateway.rig import FakeEngine, Rig, looped, rig
from gateway.test_listeners import admin_of

from moestro.core.hashing import HASH_BYTES
from moestro.core.prefix_tree import PrefixTree
from moestro.gateway.kv.index_transfer import PromptsPart, TransferHead, _parts, _Runs

TEXT = "one router has seen this, the other has not; " * 60
BODY = json.dumps({"messages": [{"role": "user", "content": TEXT}]}).encode()


def message(content: object) -> bytes:
    encoded = b"" if content is None else msgspec.msgpack.encode(content)
    return len(encoded).to_bytes(4) + encoded


def index(head: TransferHead, *parts: PromptsPart) -> bytes:
    return b"".join(message(each) for each in (head, *parts, None))


def prompts_of(it: Rig, name: str) -> list[bytes]:
    return [last.hashes() for last in it.app.shared.fleet.router.prompts_sent(it.engine(name).row)]


@looped
async def test_a_router_that_takes_an_index_sends_a_conversation_where_it_was_before():
    engines = [FakeEngine(name) for name in "abcdef"]
    async with rig(*engines, route_policy="lmetric:hotspots=off") as it, admin_of(it) as admin:
        router, fleet = it.app.shared.fleet.router, it.app.shared.fleet
        chosen = (await it.call(body=BODY)).headers["x-moestro-engine"]
        given = await (await admin.get("/admin/index")).read()
        for engine in fleet:  # as if it had never seen them
            router.engine_lost(engine.row, 1)
            assert router.prompts_sent(engine.row) == []
        for _ in range(3):  # now and then, as a standby is updated: what was handed over before makes room
            taken = await admin.put("/admin/index", data=given)
            assert (taken.status, await taken.json()) == (200, {"prompts": 1})
            assert await (await admin.get("/admin/index")).read() == given
        for _ in range(4):
            assert (await it.call(body=BODY)).headers["x-moestro-engine"] == chosen


@looped
async def test_what_is_handed_over_again_takes_the_place_of_the_first_and_not_of_the_routers_own():
    async with rig(FakeEngine("a"), route_policy="lmetric") as it, admin_of(it) as admin:
        await it.call(body=BODY)
        own = prompts_of(it, "a")
        head = TransferHead(it.app.engine_admin.reading, [it.engine("a").url])
        for i in range(3):
            runs = [(-1, bytes([i + 1]) * 32), (0, bytes([i + 11]) * 16)]
            taken = await admin.put("/admin/index", data=index(head, PromptsPart(0, runs, [1, 0])))
            assert await taken.json() == {"prompts": 2}
            assert prompts_of(it, "a") == [*own, bytes([i + 1]) * 32 + bytes([i + 11]) * 16, bytes([i + 1]) * 32]


@looped
async def test_engines_that_are_not_here_are_passed_over():
    async with rig(FakeEngine("a")) as it, admin_of(it) as admin:
        head = TransferHead(it.app.engine_admin.reading, ["http://elsewhere:1", it.engine("a").url])
        parts = [PromptsPart(0, [(-1, bytes(16))], [0]), PromptsPart(1, [], [0])]
        taken = await admin.put("/admin/index", data=index(head, *parts))
        assert await taken.json() == {"prompts": 1}
        assert prompts_of(it, "a") == [bytes(16)]


@looped
async def test_what_is_no_index_or_one_in_other_blocks_is_refused():
    async with rig(FakeEngine("a")) as it, admin_of(it) as admin:
        url = it.engine("a").url
        head = TransferHead(it.app.engine_admin.reading, [url])
        whole = index(head, PromptsPart(0, [(-1, bytes(16))], [0]))
        for data, status, words in (
            (b"", 400, "not a complete index of another router"),
            (b"hello", 413, "at most"),
            (b"\0\0\0\5hello", 400, "not a complete index of another router"),
            (whole[:-4], 400, "not a complete index of another router"),
            (whole[:-9], 400, "not a complete index of another router"),
            (index(head, PromptsPart(0, [(-1, b"short")], [0])), 400, "not a whole number of blocks"),
            (index(head, PromptsPart(0, [(0, bytes(16))], [0])), 400, "precedes its parent"),
            (index(head, PromptsPart(0, [(-1, bytes(16))], [1])), 400, "an unknown run"),
            (index(head, PromptsPart(1, [(-1, bytes(16))], [0])), 400, "an unknown engine"),
            ((33 << 20).to_bytes(4) + b"x", 413, "A part of an index may have at most"),
            (index(head, PromptsPart(0, [(-1, bytes(16))], [0] * 257)), 400, "not a complete index of another router"),
            (index(head, PromptsPart(0, [(-1, bytes(16 << 20)), (0, bytes(16))], [0])), 400, "more than 1,048,576"),
            (index(TransferHead("as text, in blocks of 7 bytes", [url])), 409, "in blocks of 7 bytes"),
        ):
            refused = await admin.put("/admin/index", data=io.BytesIO(data))
            assert refused.status == status
            assert words in await refused.text()


def chains(rng: random.Random, num_prompts: int) -> list[bytes]:
    """Conversations that share beginnings; a block's name tells all that is before it."""
    prompts = []
    for _ in range(num_prompts):
        names = [f"{rng.randrange(3)}" for _ in range(rng.randrange(1, 12))]
        prompts.append(b"".join("".join(names[: n + 1]).rjust(HASH_BYTES).encode() for n in range(len(names))))
    return prompts


@pytest.mark.parametrize("seed", range(5))
def test_law_prompts_come_out_as_they_were_whatever_the_tree_does_meanwhile(seed, monkeypatch):
    monkeypatch.setattr("moestro.gateway.kv.index_transfer._PART_PROMPTS", 3)
    rng = random.Random(seed)
    tree, prompts = PrefixTree(), chains(rng, 60)
    last_runs = [tree.add(0, prompt) for prompt in prompts]
    runs = _Runs()
    reported: list[bytes] = []
    dropped = rng.sample(range(60), 30)
    for part in _parts(0, list(last_runs), {}):
        assert len(part.prompts) <= 3
        runs.add(part.runs)
        reported += [runs.prompt(last) for last in part.prompts]
        for prompt in chains(rng, 3):  # cuts runs
            tree.add(1, prompt)
        if dropped:
            tree.drop(0, last_runs[dropped.pop()])
    assert reported == prompts


@looped
async def test_blocks_that_prompts_share_are_handed_over_once_and_requests_are_answered_meanwhile():
    rng = random.Random(0)
    shared = rng.randbytes(2000 * HASH_BYTES)
    async with rig(FakeEngine("a"), FakeEngine("b"), route_policy="lmetric") as it, admin_of(it) as admin:
        router = it.app.shared.fleet.router
        for name in "ab":
            for _ in range(1500):
                router.sent_elsewhere(it.engine(name).row, shared + rng.randbytes(HASH_BYTES), 10**18)
        given = await (await admin.get("/admin/index")).read()
        assert len(given) < router.index_bytes, "unrolled it has 96 MB"
        taking = asyncio.ensure_future(admin.put("/admin/index", data=given))
        num_answered = 0
        while not taking.done():
            assert (await it.call(path="/version", method="GET")).status == 200
            num_answered += 1
        assert num_answered > 2
        assert await (await taking).json() == {"prompts": 3000}
        assert len(prompts_of(it, "a")) == 1500
        for name in "ab":
            router.engine_lost(it.engine(name).row, 10**18)
