"""`moestro route --workers`: several processes at one port, as an operator and clients see them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import psutil
import pytest
from gateway.rig import CHAT, FakeEngine, Received, Wire, looped, request_bytes
from prometheus_client.parser import text_string_to_metric_families
from support.running import MOESTRO, PATIENCE_S, Running, run_command

from moestro.errors import ConfigError
from moestro.gateway.discovery.operator_changes import (
    ChangeMade,
    OperatorChange,
    OperatorChanges,
    in_effect,
    leave_drained,
    leave_removed,
)
from moestro.gateway.part_settings import QueueSettings
from moestro.gateway.settings import AdminSettings, FrontSettings, PickerSettings, RouteSettings
from moestro.gateway.workers import _WorkerPlan, merged_engines, merged_metrics, numbered
from moestro.web.settings import AccessSettings

NUM = 3
patient = functools.partial(looped, seconds=PATIENCE_S)


@contextlib.asynccontextmanager
async def started(directory: Path, *engines: FakeEngine, flags: tuple[str, ...] = ()) -> AsyncIterator[Running]:
    """`moestro route --workers 3` before engines of this process."""
    for engine in engines:
        await engine.start()
    urls = tuple(part for e in engines for part in ("--engine", f"{e.name}=http://127.0.0.1:{e.port}"))
    command = (MOESTRO, "route", *urls, "--admin-port", "0", "--workers", str(NUM), "--health-interval", "0.5", *flags)
    running = await asyncio.to_thread(Running, command, directory)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            await asyncio.to_thread(running.stop)
        for engine in engines:
            engine.die()


def admin_url(running: Running) -> str:
    found = re.search(r"(http://127\.0\.0\.1:\d+)/admin/engines", running.text)
    assert found, running.text
    return found[1]


async def read(session: aiohttp.ClientSession, url: str, method: str = "GET", **given: object) -> object:
    async with session.request(method, url, **given) as answer:
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def ask(running: Running, text: str) -> Mapping[str, str]:
    """One chat on a connection of its own, which the kernel gives to any worker."""
    body = {"messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.post(f"{running.url}{CHAT}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return answer.headers.copy()


def sample(text: str, name: str, **labels: str) -> list[float]:
    return [
        each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    ]


async def until(condition, *arguments: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition(*arguments):  # noqa: ASYNC110 (the condition is another process's)
            await asyncio.sleep(0.05)


async def _are_ready(session: aiohttp.ClientSession, admin: str) -> bool:
    metrics = str(await read(session, f"{admin}/metrics"))
    return sample(metrics, "moestro:route_peers") == [NUM - 1.0] * NUM


async def _has_a(session: aiohttp.ClientSession, admin: str, condition: str, num_workers: int = NUM) -> bool:
    metrics = str(await read(session, f"{admin}/metrics"))
    found = sample(metrics, "moestro:route_engine_condition", engine="a", condition=condition)
    return found == [1.0] * num_workers


async def stay(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.open_stream()
    wire.chunk(b"data: {}\n\n")
    await engine.gate.wait()
    wire.chunk(b"data: [DONE]\n\n")
    wire.end_stream()


@pytest.mark.timeout(600)
def test_workers_share_a_port_and_one_admin_plane(tmp_path):
    @patient
    async def test():
        engines = [FakeEngine(name) for name in "ab"]
        async with started(tmp_path, *engines) as running, aiohttp.ClientSession() as session:
            admin = admin_url(running)
            assert "workers" in running.text
            assert running.text.count("ready in") == 1
            ids = [(await ask(running, f"hello {i}"))["X-Request-Id"] for i in range(40)]
            await until(_are_ready, session, admin)
            metrics = str(await read(session, f"{admin}/metrics"))
            by_worker = [sum(sample(metrics, "moestro:route_requests_total", worker=str(at))) for at in range(NUM)]
            assert sum(by_worker) == 40
            assert sum(count > 0 for count in by_worker) >= 2, "the kernel spreads connections"
            # every request is explained, whichever worker has it
            for request_id in ids[::10]:
                assert (await read(session, f"{admin}/admin/explain/{request_id}"))["request_id"] == request_id
            assert len((await read(session, f"{admin}/admin/decisions?limit=40"))["decisions"]) == 40
            shown = (await read(session, f"{admin}/admin/engines"))["engines"]
            assert [engine["condition"] for engine in shown] == ["up", "up"]
            assert sum(engine["num_decisions"] for engine in shown) == 40
            figures = await read(session, f"{admin}/statistics")
            assert sum(engine["num_requests"] for engine in figures["engines"]) == 40
            assert "<html" in str(await read(session, f"{admin}/"))
            async with session.get(f"{admin}/admin/explain/none") as answer:
                assert answer.status == 404
            # a drain holds in all workers, and in one that is killed and started again
            drained = await read(session, f"{admin}/admin/engines/a/drain", "POST")
            assert drained["condition"] == "draining"
            workers = psutil.Process(running.process.pid).children()
            num_before = len(engines[0].received)
            os.kill(workers[0].pid, signal.SIGKILL)
            await until(_are_ready, session, admin)
            await until(_has_a, session, admin, "draining")
            for i in range(20):
                assert (await ask(running, f"hello again {i}"))["x-moestro-engine"] == "b"
            assert len(engines[0].received) == num_before
            assert "worker 0 ended with status -9" in running.text
            assert await asyncio.to_thread(running.stop) == 0
            assert "ERROR" not in running.text
            assert not any(worker.is_running() for worker in workers)

    test()


@pytest.mark.timeout(600)
def test_a_worker_that_starts_again_has_drains_before_it_takes_requests(tmp_path):
    @patient
    async def test():
        engines = [FakeEngine(name) for name in "ab"]
        flags = ("--route-policy", "round_robin")
        async with started(tmp_path, *engines, flags=flags) as running, aiohttp.ClientSession() as session:
            admin = admin_url(running)
            await until(_are_ready, session, admin)
            for action in ("drain", "resume", "drain"):
                await read(session, f"{admin}/admin/engines/a/{action}", "POST")
            num_before = len(engines[0].received)
            os.kill(psutil.Process(running.process.pid).children()[0].pid, signal.SIGKILL)

            async def takes_requests() -> bool:
                answers = await asyncio.gather(*(ask(running, "hello") for _ in range(10)), return_exceptions=True)
                taken = [each["x-moestro-engine"] for each in answers if not isinstance(each, aiohttp.ClientError)]
                assert set(taken) <= {"b"}
                metrics = str(await read(session, f"{admin}/metrics"))
                return sum(sample(metrics, "moestro:route_requests_total", worker="0")) > 10

            await until(takes_requests)  # requests arrive all the time while the worker starts
            assert len(engines[0].received) == num_before

    test()


async def listed_engines(tmp_path: Path) -> tuple[list[FakeEngine], str, str, Path]:
    """Start two engines, and return them, the line of each in a list, and a list that has both."""
    engines = [FakeEngine(name) for name in "ab"]
    for engine in engines:
        await engine.start()
    a, b = (json.dumps({"url": f"http://127.0.0.1:{engine.port}", "name": engine.name}) for engine in engines)
    listed = tmp_path / "engines.jsonl"
    listed.write_text(f"{a}\n{b}\n")
    return engines, a, b, listed


@pytest.mark.timeout(600)
def test_a_drain_holds_for_an_engine_that_a_list_names_after_a_workers_first_look(tmp_path):
    @patient
    async def test():
        engines, a, b, listed = await listed_engines(tmp_path)
        flags = ("--route-policy", "round_robin", "--engine-file", str(listed))
        async with started(tmp_path, flags=flags) as running, aiohttp.ClientSession() as session:
            admin = admin_url(running)
            await until(_are_ready, session, admin)
            await until(_has_a, session, admin, "up")
            assert (await read(session, f"{admin}/admin/engines/a/drain", "POST"))["name"] == "a"
            listed.write_text(f"{b}\n")
            os.kill(psutil.Process(running.process.pid).children()[0].pid, signal.SIGKILL)
            await until(_are_ready, session, admin)
            # the new worker does not know the engine, and the others keep what they know of it
            for action in ("resume", "drain"):
                assert (await read(session, f"{admin}/admin/engines/a/{action}", "POST"))["name"] == "a"
            listed.write_text(f"{a}\n{b}\n")
            await until(_has_a, session, admin, "draining")
            assert {(await ask(running, f"{i}"))["x-moestro-engine"] for i in range(30)} == {"b"}
            assert not engines[0].received
            await read(session, f"{admin}/admin/engines/a/resume", "POST")
            await until(_has_a, session, admin, "up")
        for engine in engines:
            engine.die()

    test()


@pytest.mark.timeout(600)
def test_a_removal_holds_in_all_workers_whenever_a_list_names_the_engine(tmp_path):
    @patient
    async def test():
        engines, a, b, listed = await listed_engines(tmp_path)
        flags = ("--route-policy", "round_robin", "--engine-file", str(listed))
        async with started(tmp_path, flags=flags) as running, aiohttp.ClientSession() as session:
            admin = admin_url(running)
            await until(_are_ready, session, admin)
            await until(_has_a, session, admin, "up")
            listed.write_text(f"{b}\n")
            os.kill(psutil.Process(running.process.pid).children()[0].pid, signal.SIGKILL)
            await until(_are_ready, session, admin)
            await until(_has_a, session, admin, "absent", NUM - 1)  # the new worker does not know it
            async with session.delete(f"{admin}/admin/engines/a") as answer:
                assert answer.status == 204
            listed.write_text(f"{a}\n{b}\n")
            reads = functools.partial(_has_read, session, admin)
            await until(reads)
            os.kill(psutil.Process(running.process.pid).children()[1].pid, signal.SIGKILL)
            await until(_are_ready, session, admin)  # another one whose list names it at its start
            assert {(await ask(running, f"{i}"))["x-moestro-engine"] for i in range(30)} == {"b"}
            shown = (await read(session, f"{admin}/admin/engines"))["engines"]
            assert [engine["name"] for engine in shown] == ["b"]
            url = {"url": f"a=http://127.0.0.1:{engines[0].port}"}
            async with session.post(f"{admin}/admin/engines", json=url) as answer:
                assert answer.status == 201
            await until(_has_a, session, admin, "up")
        for engine in engines:
            engine.die()

    test()


async def _has_read(session: aiohttp.ClientSession, admin: str) -> bool:
    """Whether the list of each worker has both engines."""
    metrics = str(await read(session, f"{admin}/metrics"))
    return sample(metrics, "moestro:route_discovery_engines", source="file") == [2.0] * NUM


def takes_connections(pid: int, port: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).net_connections()
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)
    return False


@pytest.mark.timeout(600)
def test_changes_outlive_the_admin_planes_process_and_reach_workers_without_it(tmp_path):
    @patient
    async def test():
        engines = [FakeEngine(name) for name in "abc"]
        await engines[2].start()
        flags = ("--route-policy", "round_robin")
        async with started(tmp_path, *engines[:2], flags=flags) as running, aiohttp.ClientSession() as session:
            admin = admin_url(running)
            await until(_are_ready, session, admin)
            starter = psutil.Process(running.process.pid)
            *workers, operators = [child.pid for child in starter.children()]
            url = f"c=http://127.0.0.1:{engines[2].port}"
            assert (await read(session, f"{admin}/admin/engines", "POST", json={"url": url}))["name"] == "c"
            await read(session, f"{admin}/admin/engines/a/drain", "POST")
            assert "error" in await read(session, f"{admin}/admin/engines/none/drain", "POST")
            os.kill(operators, signal.SIGKILL)
            await until(_has_a, session, admin, "draining")  # by its successor
            known = {child.pid for child in starter.children()}
            successor = (known - {operators, *workers}).pop()
            os.kill(successor, signal.SIGSTOP)  # no process serves operators
            os.kill(workers[0], signal.SIGKILL)

            async def starts_again() -> bool:
                new = {child.pid for child in starter.children()} - known
                return any(takes_connections(pid, running.address[1]) for pid in new)

            await until(starts_again)
            taken = {(await ask(running, f"{i}"))["x-moestro-engine"] for i in range(60)}
            assert taken == {"b", "c"}, "the drained engine gets nothing, and the added one its part"
            os.kill(successor, signal.SIGCONT)
            await until(_has_a, session, admin, "draining")
            shown = (await read(session, f"{admin}/admin/engines"))["engines"]
            assert [engine["name"] for engine in shown] == ["a", "b", "c"]
        engines[2].die()

    test()


def added(name: str, host: str = "h") -> OperatorChange:
    return OperatorChange(ChangeMade.ADD, name, f"{name}=http://{host}:1")


def test_the_list_of_changes_has_those_in_effect_and_stays_within_its_memory():
    changes = OperatorChanges()
    assert changes.read() == []
    drain, resume = (OperatorChange(made, "a") for made in (ChangeMade.DRAIN, ChangeMade.RESUME))
    gone = OperatorChange(ChangeMade.REMOVE, "b")
    changes.write([added("a"), *[drain, resume] * 500, added("b"), gone, drain])
    assert changes.read() == [added("a"), gone, drain]
    changes.write([*changes.read(), *[added("b"), gone] * 500, added("b", "other")])
    assert changes.read() == [added("a"), drain, gone, added("b", "other")]
    many = [added(str(number), "x" * 1000) for number in range(2000)]
    changes.write(many)
    kept = changes.read()
    assert 500 < len(kept) < 1100
    assert kept == many[-len(kept) :], "the oldest ones are forgotten"
    changes.write([])
    assert changes.read() == []


def test_what_changes_leave_is_the_same_without_those_that_are_replaced():
    rng = random.Random(1)
    for _ in range(300):
        made = [(rng.choice([*ChangeMade]), rng.choice(["a", "a@0", "b"])) for _ in range(rng.randrange(9))]
        changes = [OperatorChange(*each) for each in made]
        kept = in_effect(changes)
        assert leave_removed(kept) == leave_removed(changes)
        for name in ("a", "a@0", "b"):
            drained = leave_drained(changes, name, name[0])
            assert leave_drained(kept, name, name[0]) == drained
            assert in_effect(kept) == kept


@pytest.mark.timeout(600)
def test_workers_count_each_others_requests_and_drain_together(tmp_path):
    @patient
    async def test():
        engines = [FakeEngine(name, stay) for name in "abc"]
        for engine in engines:
            engine.gate = asyncio.Event()
        flags = ("--route-policy", "least_loaded")
        async with started(tmp_path, *engines, flags=flags) as running:
            streams = []
            for i in range(12):
                reader, writer = await asyncio.open_connection(*running.address)
                writer.write(request_bytes(CHAT, {"messages": [{"role": "user", "content": f"{i}"}], "stream": True}))
                await reader.readuntil(b"data: {}")
                streams.append((reader, writer))
                await asyncio.sleep(0.1)  # the others learn of it
            assert [len(engine.received) for engine in engines] == [4, 4, 4]
            stopping = asyncio.create_task(asyncio.to_thread(running.stop))
            await asyncio.sleep(0.3)
            assert running.process.poll() is None, "requests are running"
            for engine in engines:
                engine.gate.set()
            for reader, writer in streams:
                assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                writer.close()
            assert await stopping == 0

    test()


@pytest.mark.timeout(600)
def test_workers_end_with_the_process_that_started_them(tmp_path):
    @patient
    async def test():
        async with started(tmp_path, FakeEngine("a"), flags=("--host", "0.0.0.0")) as running:
            assert running.text.count("without --api-key") == 1, "the port is open to all, which one worker says"
            children = psutil.Process(running.process.pid).children()
            assert len(children) == NUM + 1
            running.process.kill()
            await asyncio.to_thread(running.process.wait)
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE_S)
            assert not alive

    test()


def test_a_port_that_is_taken_is_refused_at_once(tmp_path):
    @patient
    async def test():
        engine = FakeEngine("a")
        await engine.start()
        url = ("--engine", f"http://127.0.0.1:{engine.port}")
        for flag in ("--port", "--admin-port"):
            command = (MOESTRO, "route", *url, "--workers", "2", flag, str(engine.port))
            done = await asyncio.to_thread(run_command, command)
            assert done.returncode == 2
            assert "cannot listen on 127.0.0.1" in done.stderr
            assert (done.stdout + done.stderr).count("cannot listen") == 1
        engine.die()

    test()


def test_metrics_of_workers_keep_their_numbers():
    text = (
        '# HELP m_total Words with {braces}.\n# TYPE m_total counter\nm_total 1.0\nm_total{engine="a b"} 2.0\n'
        '# HELP h Text.\n# TYPE h histogram\nh_bucket{le="1"} 3\nh_sum 4\n'
    )
    merged = merged_metrics({0: text, 2: text}).decode()
    assert merged.splitlines() == [
        "# HELP m_total Words with {braces}.",
        "# TYPE m_total counter",
        'm_total{worker="0"} 1.0',
        'm_total{worker="0",engine="a b"} 2.0',
        'm_total{worker="2"} 1.0',
        'm_total{worker="2",engine="a b"} 2.0',
        "# HELP h Text.",
        "# TYPE h histogram",
        'h_bucket{worker="0",le="1"} 3',
        'h_sum{worker="0"} 4',
        'h_bucket{worker="2",le="1"} 3',
        'h_sum{worker="2"} 4',
    ]


def test_an_engine_that_one_worker_finds_dead_is_shown_so():
    def shown(condition: str, cause: str | None) -> dict[str, object]:
        return {"name": "a", "condition": condition, "cause": cause, "num_in_flight": 2, "num_decisions": 5}

    [merged] = merged_engines([[shown("up", None)], [shown("down", "refused")]])
    assert merged == shown("down", "refused") | {"num_in_flight": 4, "num_decisions": 10}


def test_settings_of_workers():
    assert numbered(Path("/x/record.jsonl"), 2) == Path("/x/record.2.jsonl")
    assert json.dumps(str(numbered(Path("record"), 0))) == '"record.0"'
    for workers in (0, 65):
        with pytest.raises(ConfigError, match="workers"):
            FrontSettings(workers=workers)
    with pytest.raises(ConfigError, match="leave --workers out"):
        RouteSettings(front=FrontSettings(workers=2), picker=PickerSettings(ext_proc=9000))


@pytest.mark.timeout(600)
def test_limits_of_keys_count_in_all_workers(tmp_path):
    """Each worker once let a key have the whole limit."""
    (tmp_path / "keys").write_text("k")
    keys = ("--api-key-file", str(tmp_path / "keys"))
    flags = (*keys, "--max-requests-per-minute-per-key", "7", "--max-concurrent-requests-per-key", "2")

    @patient
    async def test():
        engine = FakeEngine("a", stay)
        engine.gate = asyncio.Event()
        async with started(tmp_path, engine, flags=flags) as running, aiohttp.ClientSession() as session:
            admin = admin_url(running)
            assert "Authorization: Bearer" in running.text, "the banner's example has a key"
            await until(_are_ready, session, admin)
            async with contextlib.AsyncExitStack() as open_answers:
                answers = [await open_answers.enter_async_context(_chat(running)) for _ in range(5)]
                statuses = sorted(each.status for each in answers)
                assert statuses == [200, 200, 429, 429, 429], "two at a time, whichever worker has them"
                engine.gate.set()
                for each in answers:
                    await each.read()
            late = []
            for _ in range(12):
                async with _chat(running) as answer:
                    late.append(answer.status)
                    await answer.read()
            assert late.count(429) >= 6, "seven in a minute, of which five are used; each worker has room for all"

    test()


@contextlib.asynccontextmanager
async def _chat(running: Running) -> AsyncIterator[aiohttp.ClientResponse]:
    """A chat with a key, on a connection of its own."""
    body, headers = {"messages": [{"role": "user", "content": "hi"}]}, {"Authorization": "Bearer k"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.post(f"{running.url}{CHAT}", json=body, headers=headers) as answer,
    ):
        yield answer


def test_bounds_of_connections_and_of_the_queue_are_divided_among_workers():
    settings = RouteSettings(
        front=FrontSettings(workers=4, max_connections=10, port=0),
        admin=AdminSettings(admin_port=0),
        access=AccessSettings(max_connections_per_address=6),
        queue=QueueSettings(queue_policy="fcfs", queue_max_requests=9),
    )
    with contextlib.ExitStack() as reserved:
        of_one = _WorkerPlan.of(settings, reserved).settings_of(settings, 1)
    assert (of_one.front.max_connections, of_one.access.max_connections_per_address) == (3, 2)
    assert (of_one.queue.queue_max_requests, of_one.queue.queue_max_tokens) == (3, None)
