"""Packed request bodies: what they unpack to, what is refused, and how many bytes a refused request unpacks."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway.rig import FakeEngine, admin_of, looped, rig
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import RequestError
from moestro.server.admin import admin_runner
from moestro.web import bodies as bodies_module
from moestro.web.access import Access
from moestro.web.bodies import FREE_BYTES, MAX_MEMBERS, MAX_RATIO, Bodies, Unpacker, coding_in, unpacked
from moestro.web.errors import ContentEncodingError, HttpError, Refusals, error_json
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import FrontLimits, bound_socket, http_front
from moestro.web.ports.faults import Faults, Port

LIMIT = 4 << 20  # of a body
STEP = 64 << 10  # of unpacking: what may be unpacked before a limit is noticed
KEY = {"Authorization": "Bearer key"}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACK = {"gzip": gzip.compress, "deflate": zlib.compress, "x-gzip": gzip.compress, "Deflate": raw_deflate}
BODIES = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda part, count: part * count, st.binary(min_size=1, max_size=40), st.integers(1, 20_000)),
)


def outcome(data: bytes, coding: str, cuts: list[int], limit: int = LIMIT) -> bytes | int:
    """What a body that comes in parts unpacks to, or the status of its refusal."""
    name = coding_in(coding)
    assert name is not None
    unpacker, whole = Unpacker(name, limit), bytearray()
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    try:
        for start, end in pairwise(borders):
            for piece in unpacker.pieces(data[start:end]):
                whole += piece
                assert len(piece) <= STEP
        unpacker.end()
    except HttpError as error:
        assert len(whole) <= limit + 1
        return error.http_status
    return bytes(whole)


@given(BODIES, st.sampled_from(sorted(PACK)), st.lists(st.integers(0, 3000), max_size=4))
def test_a_body_unpacks_to_what_was_packed_in_whatever_parts_it_comes(body, coding, cuts):
    expected = 413 if len(body) > max(FREE_BYTES, MAX_RATIO * len(PACK[coding](body))) else body
    assert outcome(PACK[coding](body), coding, cuts) == expected


@given(BODIES.filter(len), st.sampled_from(sorted(PACK)), st.data())
def test_a_body_that_is_cut_off_is_400(body, coding, data):
    whole = PACK[coding](body)
    assert outcome(whole[: data.draw(st.integers(1, len(whole) - 1))], coding, []) in (400, 413)


@given(st.binary(min_size=1, max_size=300), st.sampled_from(sorted(PACK)), st.lists(st.integers(0, 300), max_size=3))
def test_junk_is_400_or_what_zlib_makes_of_it(junk, coding, cuts):
    got = outcome(junk, coding, cuts)
    if isinstance(got, bytes):
        assert PACK[coding](got)  # a stream by chance
    else:
        assert got == 400


@given(BODIES, st.integers(1, 5000))
def test_no_more_than_the_limit_is_unpacked(body, limit):
    got = outcome(gzip.compress(body), "gzip", [], limit)
    assert got == (body if max(len(body), len(gzip.compress(body))) <= limit else 413)


def test_a_bomb_is_413_by_its_ratio_before_it_reaches_the_limit():
    sizes: list[int] = []
    pieces = Unpacker("gzip", 1 << 30).pieces(gzip.compress(bytes(64 << 20)))
    with pytest.raises(HttpError, match="more than 100 times its size") as refused:
        sizes.extend(map(len, pieces))
    assert refused.value.http_status == 413
    assert sum(sizes) <= FREE_BYTES


def test_gzip_members_are_joined_up_to_a_bound_and_never_unpacked_twice():
    member = gzip.compress(b"ab")
    assert unpacked(member * MAX_MEMBERS, "gzip", LIMIT) == b"ab" * MAX_MEMBERS
    with pytest.raises(HttpError, match=f"more than {MAX_MEMBERS} gzip members"):
        unpacked(member * (MAX_MEMBERS + 1), "gzip", LIMIT)
    assert unpacked(gzip.compress(member), "gzip", LIMIT) == member


def test_bytes_behind_a_stream_are_400():
    for packed, coding in ((zlib.compress(b"ab") + b"c", "deflate"), (gzip.compress(b"ab") + b"\0\0", "gzip")):
        with pytest.raises(HttpError, match=f"not valid {coding} data"):
            unpacked(packed, coding, LIMIT)


@pytest.mark.parametrize("named", ["br", "zstd", "gzip, gzip", "deflate,gzip", "compress", "\xff", "gzip;q=1"])
def test_a_coding_that_is_not_offered_is_415_and_names_those_that_are(named):
    with pytest.raises(RequestError, match="gzip, deflate or identity") as refused:
        coding_in(named)
    assert refused.value.http_status == 415
    assert refused.value.headers["Accept-Encoding"] == "gzip, deflate"


def test_a_coding_of_bytes_that_are_no_utf_8_is_repeated_without_them():
    with pytest.raises(ContentEncodingError) as refused:
        coding_in("\udcff")
    assert refused.value.message.isprintable()
    assert error_json(refused.value)


@pytest.mark.parametrize("named", ["", "identity", "Identity, identity", " , "])
def test_identity_is_no_coding(named):
    assert coding_in(named) is None


# --- which requests are unpacked --------------------------------------------------------------------------------------


class CountingZlib:
    """zlib, which counts the bytes that it unpacks."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(zlib, name)

    def decompressobj(self, *args: Any, **kwargs: Any) -> CountingInflater:
        return CountingInflater(self, zlib.decompressobj(*args, **kwargs))


class CountingInflater:
    def __init__(self, counts: CountingZlib, inflater: Any) -> None:
        self._counts, self._inflater = counts, inflater

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inflater, name)

    def decompress(self, *args: Any) -> bytes:
        piece = self._inflater.decompress(*args)
        self._counts.num_bytes += len(piece)
        return piece


@pytest.fixture
def counted(monkeypatch) -> Iterator[CountingZlib]:
    """Counts what is unpacked, by Moestro or by aiohttp."""
    counting = CountingZlib()
    monkeypatch.setattr(bodies_module, "zlib", counting)
    aiohttp.set_zlib_backend(counting)
    yield counting
    aiohttp.set_zlib_backend(zlib)


@contextlib.asynccontextmanager
async def serving(runner: web.AppRunner) -> AsyncIterator[str]:
    listener = bound_socket("127.0.0.1", 0)
    front = http_front(Port.OPERATORS, runner, listener, FrontLimits(100), Faults()).open()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        front.close()
        await runner.cleanup()
        listener.close()


async def read(http: web.Request) -> web.Response:
    async with Bodies(max_body_bytes=LIMIT).reading(http) as body:
        return web.json_response({"size": len(body)})


async def ignore(http: web.Request) -> web.Response:
    return web.Response()


async def post(url: str, body: bytes, *, method: str = "POST", **headers: str) -> tuple[int, bytes]:
    typed = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=io.BytesIO(body), headers=typed) as got,
    ):
        return got.status, await got.read()


BOMB = gzip.compress(bytes(20 << 20))
REFUSED = {
    "no key": ("/read", {}, BOMB, 401),
    "a wrong path": ("/nothing", KEY, BOMB, 404),
    "a wrong method": ("/ignore", KEY, BOMB, 405),
    "a wrong type": ("/read", KEY | {"Content-Type": "text/plain"}, BOMB, 415),
    "a wrong coding": ("/read", KEY | {"Content-Encoding": "br"}, BOMB, 415),
    "two codings": ("/read", KEY | {"Content-Encoding": "gzip, gzip"}, BOMB, 415),
    "too large": ("/read", KEY, bytes(LIMIT + 1), 413),
}


@pytest.mark.parametrize(("path", "headers", "body", "status"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_is_refused_by_its_head_is_never_unpacked(counted, path, headers, body, status):
    async def test() -> None:
        app = web.Application()
        app.add_routes([web.post("/read", read), web.get("/ignore", ignore)])
        runner = await HttpMiddleware(Access.of(["key"]), Refusals(), LIMIT, Faults()).runner(app, shutdown_timeout=1)
        async with serving(runner) as url:
            assert (await post(url + path, body, **{"Content-Encoding": "gzip"} | headers))[0] == status
            assert counted.num_bytes == 0
            assert (await post(f"{url}/read", BOMB, Content_Encoding="gzip", **KEY))[0] == 413
            assert 0 < counted.num_bytes <= FREE_BYTES + STEP

    asyncio.run(test())


def test_a_body_that_no_handler_reads_is_never_unpacked(counted):
    async def test() -> None:
        app = web.Application()
        app.add_routes([web.post("/ignore", ignore)])
        runner = await HttpMiddleware(Access.of(()), Refusals(), LIMIT, Faults()).runner(app, shutdown_timeout=1)
        async with serving(runner) as url:
            assert (await post(f"{url}/ignore", BOMB, Content_Encoding="gzip"))[0] == 200
            assert (await post(f"{url}/ignore", b"junk", Content_Encoding="gzip"))[0] == 200
        assert counted.num_bytes == 0

    asyncio.run(test())


def test_a_request_behind_a_body_that_its_handler_does_not_read_is_answered():
    async def test() -> None:
        may_answer = asyncio.Event()

        async def wait(_http: web.Request) -> web.Response:
            await may_answer.wait()
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/wait", wait), web.get("/ignore", ignore)])
        runner = await HttpMiddleware(Access.of(()), Refusals(), LIMIT, Faults()).runner(app, shutdown_timeout=1)
        async with serving(runner) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"POST /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
            await asyncio.sleep(0.05)  # The handler waits, and the body is still to come.
            writer.write(b"bodyGET /ignore HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.05)
            may_answer.set()
            for _ in range(2):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                assert head.startswith(b"HTTP/1.1 200 ")
            writer.close()

    asyncio.run(test())


def test_two_content_encodings_are_400():
    async def test() -> None:
        app = web.Application()
        app.add_routes([web.post("/read", read)])
        runner = await HttpMiddleware(Access.of(()), Refusals(), LIMIT, Faults()).runner(app, shutdown_timeout=1)
        async with serving(runner) as url, aiohttp.ClientSession() as session:
            headers = [("Content-Encoding", "gzip"), ("Content-Encoding", "gzip"), ("Content-Type", "application/json")]
            async with session.post(f"{url}/read", data=BOMB, headers=headers) as got:
                assert got.status == 400

    asyncio.run(test())


def test_the_operators_port_of_a_server_unpacks_nothing_without_its_key(counted):
    async def test() -> None:
        runner = await admin_runner([web.post("/read", read)], "key", Faults())
        async with serving(runner) as url:
            for path, status in (("/read", 401), ("/nothing", 401)):
                assert (await post(url + path, BOMB, Content_Encoding="gzip"))[0] == status
            assert counted.num_bytes == 0

    asyncio.run(test())


# --- the router -------------------------------------------------------------------------------------------------------


PROMPT = json.dumps({"model": "m", "prompt": "A sentence that is long enough for blocks of text. " * 20}).encode()


@looped
async def test_a_packed_prompt_is_routed_by_its_text_and_passed_on_packed():
    engine, packed = FakeEngine("a"), gzip.compress(PROMPT)
    async with rig(engine) as it:
        for name, body, headers in (("plain", PROMPT, {}), ("packed", packed, {"Content_Encoding": "gzip"})):
            assert (await it.call("/v1/completions", body, X_Request_Id=name, **headers)).status == 200
        plain, second = (it.app.shared.decision_log.trace(name) for name in ("plain", "packed"))
        assert second.prompt_tokens == plain.prompt_tokens
        assert second.attempts[0].hit_tokens > 100  # the blocks of the request before it
        assert engine.received[1].body == packed
        assert engine.received[1].header("content-encoding") == "gzip"


@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        (BOMB, "gzip", 413),
        (b"junk", "gzip", 400),
        (gzip.compress(PROMPT)[:-9], "gzip", 400),
        (PROMPT, "br", 415),
        (gzip.compress(PROMPT), "gzip, gzip", 415),
    ],
    ids=["a bomb", "junk", "cut", "br", "two codings"],
)
@looped
async def test_what_a_router_cannot_unpack_reaches_no_engine(counted, body, coding, status):
    engine = FakeEngine("e")
    async with rig(engine, max_body_bytes=LIMIT) as it:
        answer = await it.call("/v1/completions", body, Content_Encoding=coding)
        assert answer.status == status
        assert answer.headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)
        assert not engine.received
        assert counted.num_bytes <= FREE_BYTES + STEP


@looped
async def test_a_router_unpacks_nothing_for_a_request_that_it_refuses_by_its_head(counted):
    async with rig(FakeEngine("e"), api_key=("key",)) as it:
        for path, headers, status in (
            ("/v1/completions", {}, 401),
            ("/nothing", KEY, 404),
            ("/v1/models", KEY, 405),
        ):
            answer = await it.call(path, BOMB, Content_Encoding="gzip", **headers)
            assert answer.status == status
        assert counted.num_bytes == 0


@looped
async def test_the_operators_port_of_a_router_reads_packed_bodies_within_its_limit(counted):
    async with rig(FakeEngine("e")) as it, admin_of(it) as session:
        packed = {"Content-Encoding": "gzip"}
        for path, method, body, status in (
            ("/admin/engines", "POST", b"junk", 400),
            ("/admin/engines", "POST", BOMB, 413),
            ("/admin/engines", "POST", gzip.compress(b'{"url": "far=http://127.0.0.1:1"}'), 201),
        ):
            async with session.request(method, path, data=body, headers=packed) as got:
                assert got.status == status, path
        assert counted.num_bytes < 70_000
