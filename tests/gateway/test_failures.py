"""Unexpected exceptions: a user's policy that raises, a bug. One answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest
from gateway.rig import FakeEngine, Received, Rig, Wire, looped, rig, say_ok

from moestro.config.user_files import accept_user_code
from moestro.gateway.engines.health_checks import Watch
from moestro.gateway.engines.upstream import _LATE_S, Address, Pool

accept_user_code()

MOODY = """
from moestro.routing.policy_contract import Choice, EngineLost, Needs

class Moody:
    needs = Needs()
    def decide(self, view, draws):
        if view.request.user == "bad" or view.request.user == "unlucky" and not view.engines.routable.all():
            raise KeyError("the user's own code")
        return Choice(int(view.engines.routable.argmax()), 0.0, "the first")
    def observe(self, event):
        if isinstance(event, EngineLost) or getattr(getattr(event, "request", None), "user", None) == "deaf":
            raise KeyError("the user's own code")
"""


@pytest.fixture
def moody(tmp_path: Path) -> str:
    file = tmp_path / "moody.py"
    file.write_text(MOODY)
    return f"{file}:Moody"


def body_of(user: str) -> dict[str, object]:
    return {"user": user, "messages": [{"role": "user", "content": "hi"}]}


async def assert_nothing_follows(it: Rig, user: str, code: str) -> None:
    """One answer to the request, one to the next on the same connection, and no byte more when deadlines pass."""
    caller = await it.caller()
    caller.ask(body=body_of(user))
    refused = await caller.answer()
    assert (refused.status, refused.code) == (500, code)
    assert refused.headers["x-request-id"] in refused.json["error"]["message"]
    assert not it.app.shared.active
    assert it.num_in_flight == 0
    caller.ask(body=body_of("good"))
    assert (await caller.answer()).status == 200
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.reader.read(1), 0.3)


async def wait_for_template_process(it: Rig) -> None:
    """In exact mode the first chat waits for the process that renders it."""
    async with asyncio.timeout(30):
        caller = await it.caller()
        status = 0
        while status != 200:
            caller.ask(body=body_of("good"))
            status = (await caller.answer()).status


@pytest.mark.parametrize("is_exact", [False, True])
@looped
async def test_a_policy_that_raises_refuses_its_request_once(is_exact, moody, demo_dir):
    reading = {"tokenizer": demo_dir} if is_exact else {}
    async with rig(FakeEngine("a"), route_policy=moody, first_byte_timeout=0.1, **reading) as it:
        await wait_for_template_process(it)
        await assert_nothing_follows(it, "bad", "internal_error")


@looped
async def test_a_policy_that_raises_when_a_request_goes_elsewhere_refuses_it_once(moody):
    async def fail(engine: FakeEngine, wire: Wire, request: Received) -> None:
        if b"unlucky" in request.body:
            wire.reply(b"{}", 503, headers="Retry-After: 0\r\n")
        else:
            await say_ok(engine, wire, request)

    async with rig(FakeEngine("a", fail), FakeEngine("b"), route_policy=moody, first_byte_timeout=0.1) as it:
        await assert_nothing_follows(it, "unlucky", "internal_error")


@looped
async def test_a_failure_after_the_choice_gives_back_what_was_counted(moody, monkeypatch):
    async with rig(FakeEngine("a"), route_policy=moody, first_byte_timeout=0.1) as it:
        decision_log = it.app.shared.decision_log
        routed = decision_log.routed

        def fails(request, decision, because, wait_ns):
            if request.user == "good":
                routed(request, decision, because, wait_ns)
            else:
                raise ValueError("a bug")

        monkeypatch.setattr(decision_log, "routed", fails)
        await assert_nothing_follows(it, "other", "internal_error")


@looped
async def test_a_policy_that_will_not_hear_costs_no_request_and_no_engine(moody, caplog):
    async with rig(FakeEngine("a"), route_policy=moody) as it:
        assert (await it.call(body=body_of("deaf"))).status == 200
        it.app.shared.fleet.lost(it.engine("a"), "for a test", 10**18)
        await it.until_up("a")
        assert (await it.call(body=body_of("good"))).status == 200
    assert "observe failed on Routed" in caplog.text
    assert "observe failed on EngineLost" in caplog.text


@looped
async def test_a_watcher_that_fails_begins_anew(monkeypatch, caplog):
    monkeypatch.setattr("moestro.gateway.engines.health_checks._AGAIN_S", 0.01)
    num_begun = 0

    async def watcher(engine) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun < 3:
            raise ValueError("a bug")

    async with rig(FakeEngine("a")) as it:
        watch = Watch([watcher])
        watch.begin(it.engine("a").address)
        await it.until(lambda: num_begun == 3)
        watch.end(it.engine("a").address)
        await watch.close()
    assert "the watcher of engine a failed" in caplog.text


@looped
async def test_a_sweep_that_fails_goes_on(monkeypatch):
    async def say_nothing(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await asyncio.sleep(3600)

    async with rig(FakeEngine("a", say_nothing), first_byte_timeout=0.1) as it:
        look, num_looks = it.app.shared.fleet.look, 0

        def fails_once(engine, now_ns):
            nonlocal num_looks
            num_looks += 1
            if num_looks == 1:
                raise ValueError("a bug")
            look(engine, now_ns)

        monkeypatch.setattr(it.app.shared.fleet, "look", fails_once)
        assert (await it.call()).status == 504


@looped
async def test_no_trace_of_a_running_request_without_memory():
    async def wait(engine: FakeEngine, wire: Wire, request: Received) -> None:
        await asyncio.sleep(3600)

    async with rig(FakeEngine("a", wait), remember=0, first_byte_timeout=0.3) as it:
        fields = asyncio.ensure_future(it.call(X_Request_Id="runs"))
        await asyncio.sleep(0.1)
        decision_log = it.app.shared.decision_log
        assert "runs" in decision_log._running
        assert decision_log.trace("runs") is None
        assert (await fields).status == 504


@looped
async def test_books_that_cannot_be_closed_keep_no_client_from_its_answer(monkeypatch):
    async with rig(FakeEngine("a")) as it:

        def fails(*_):
            raise ValueError("a bug")

        monkeypatch.setattr(it.app.shared.decision_log, "ended", fails)
        assert (await it.call()).status == 200
        assert not it.app.shared.active


@pytest.mark.parametrize("remember", [0, 1, 3])
@looped
async def test_no_more_traces_are_kept_than_requested(remember):
    async with rig(FakeEngine("a"), remember=remember) as it:
        decision_log = it.app.shared.decision_log
        ids = [f"r{i}" for i in range(5)]
        for each in ids:
            assert (await it.call(X_Request_Id=each)).status == 200
        assert [each for each in ids if decision_log.trace(each)] == ids[len(ids) - remember :]
        assert len(decision_log._over) == remember
        assert not decision_log._running


@looped
async def test_an_id_that_comes_again_costs_no_other_story():
    async with rig(FakeEngine("a"), remember=2) as it:
        for each in ("first", "second", "second"):
            await it.call(X_Request_Id=each)
        assert it.app.shared.decision_log.trace("first") is not None
        await it.call(X_Request_Id="first")  # the newest, from now on
        await it.call(X_Request_Id="third")
        assert it.app.shared.decision_log.trace("first") is not None
        assert it.app.shared.decision_log.trace("second") is None


@looped
async def test_a_connect_limit_that_takes_effect_late_is_not_held_against_the_engine(monkeypatch):
    """The router was stopped while it connected; a limit that takes effect in time still counts."""
    async with rig(FakeEngine("a"), connect_timeout=0.1) as it:
        pool, lateness = it.engine("a").pool, [_LATE_S + 0.2]
        connect = pool._connect

        async def interrupted():
            if not lateness:
                return await connect()
            time.sleep(lateness.pop())  # noqa: ASYNC251 the whole process stands still
            raise TimeoutError

        monkeypatch.setattr(pool, "_connect", interrupted)
        assert (await pool.connect()).is_open
        lateness.append(0.0)
        with pytest.raises(TimeoutError, match=r"no connection within 0\.1 s"):  # the client reads this sentence
            await pool.connect()


class Unread:
    """Receives an answer that no one looks at."""

    def head(self, head, length): ...
    def body(self, data, *, is_last): ...
    def done(self): ...
    def broken(self, cause): ...


@looped
async def test_an_engine_that_answers_others_may_take_longer_to_accept():
    """Its queue of connections is full: the kernel drops what would begin another one."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        listening.setblocking(False)
        pool = Pool(Address(*listening.getsockname()), connect_s=0.2)
        stack.callback(pool.close)
        answered = await pool.connect()
        served = stack.enter_context((await loop.sock_accept(listening))[0])
        answered.send(b"GET / HTTP/1.1\r\nHost: e\r\n\r\n", b"", Unread(), is_bodiless=False)
        await loop.sock_sendall(served, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        stack.enter_context(socket.create_connection(listening.getsockname()))  # fills the queue
        connecting = asyncio.create_task(pool.connect())
        for _ in range(12):
            await loop.sock_sendall(served, b"1\r\na\r\n")
            await asyncio.sleep(0.05)
        assert not connecting.done()  # 0.6 s
        stack.enter_context((await loop.sock_accept(listening))[0])
        while not connecting.done():
            await loop.sock_sendall(served, b"1\r\na\r\n")
            await asyncio.sleep(0.05)
        assert connecting.result().is_open
        with pytest.raises(TimeoutError, match=r"no connection within 0\.2 s"):  # nor does it answer anyone now
            await pool.connect()


@looped
async def test_engines_of_a_test_with_a_wrong_setting_end():
    engine = FakeEngine("e")
    with pytest.raises(AssertionError, match="no such setting"):
        async with rig(engine, no_such_setting=1):
            pass
    assert not engine.server.is_serving()
