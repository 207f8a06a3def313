"""Traces of `moestro route`, received by a collector that parses OTLP."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time

import pytest
from gateway.rig import CHAT, FakeEngine, Rig, looped, rig, say_ok
from support.otlp_collector import OtlpCollector, ReceivedSpan

from moestro.errors import ConfigError
from moestro.web.settings import TracingSettings
from moestro.web.tracing import TraceContext, parse_traceparent

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ANSWER = json.dumps(
    {"usage": {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}}
).encode()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def collector():
    with OtlpCollector().running() as running:
        yield running


async def spans_of(it: Rig, collector: OtlpCollector, number: int) -> list[ReceivedSpan]:
    await it.until(lambda: len(collector.spans) >= number)
    await asyncio.sleep(0.15)
    assert len(collector.spans) == number, [span.name for span in collector.spans]
    return collector.spans


async def with_usage(engine: FakeEngine, wire, request) -> None:
    wire.reply(ANSWER)


@looped
async def test_a_request_has_a_span_and_one_for_its_attempt_and_the_engine_gets_the_context(collector):
    engine = FakeEngine("e", with_usage)
    async with rig(engine, otlp_traces_endpoint=collector.url, route_policy="lmetric") as it:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answer = await it.call(body=body, traceparent=PARENT, tracestate="v=1")
        root, attempt = await spans_of(it, collector, 2)
    assert (root.name, root.kind, root.service) == ("chat m", 2, "moestro-route")
    assert root.trace_id == attempt.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert root.parent_id == "00f067aa0ba902b7"
    assert (attempt.name, attempt.kind, attempt.parent_id) == ("attempt", 3, root.span_id)
    [got] = engine.received
    assert got.header("traceparent") == f"00-{root.trace_id}-{attempt.span_id}-01"
    assert [name.lower() for name, _ in got.headers].count("traceparent") == 1
    assert got.header("tracestate") == "v=1"
    wanted = {
        "http.request.method": "POST",
        "url.path": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.id": answer.headers["x-request-id"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 16,
    }
    assert wanted.items() <= root.attributes.items()
    assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.attributes["gen_ai.latency.e2e"] < 10
    assert root.begin_ns <= attempt.begin_ns <= attempt.end_ns <= root.end_ns
    assert abs(root.begin_ns - time.time_ns()) < 60e9
    assert {"moestro.engine": "e", "moestro.route.policy": "lmetric"}.items() <= attempt.attributes.items()
    assert attempt.attributes["moestro.route.reason"] == answer.headers["x-moestro-reason"]
    assert {"moestro.route.score", "moestro.route.hit_tokens", "server.address"} <= attempt.attributes.keys()


@looped
async def test_the_environment_names_the_service(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    engine = FakeEngine("e", with_usage)
    async with rig(engine, otlp_traces_endpoint=collector.url) as it:
        await it.call()
        await it.call(traceparent=PARENT)
        assert {span.service for span in await spans_of(it, collector, 2)} == {"mine"}


@looped
async def test_each_attempt_has_a_span_with_the_cause_of_the_next_one(collector):
    async def refuse(engine: FakeEngine, wire, request) -> None:
        wire.reply(b"{}", 503)

    engines = FakeEngine("a", refuse), FakeEngine("b", refuse)
    async with rig(*engines, otlp_traces_endpoint=collector.url) as it:
        assert (await it.call()).status == 503
        root, first, second = await spans_of(it, collector, 3)
    assert root.parent_id == ""
    assert root.error == second.error == "status 503"
    assert root.attributes["http.response.status_code"] == 503
    assert [each.attributes["http.response.status_code"] for each in (first, second)] == [503, 503]
    assert {first.attributes["moestro.engine"], second.attributes["moestro.engine"]} == {"a", "b"}
    assert second.attributes["moestro.route.retry_cause"] == f"{first.attributes['moestro.engine']} answered 503"
    contexts = {parse_traceparent(each.received[0].header("traceparent")).span_id for each in engines}
    assert contexts == {int(first.span_id, 16), int(second.span_id, 16)}


@looped
async def test_a_wait_in_the_queue_has_a_span_and_decisions_have_queue_figures(collector):
    busy = b"vllm:num_requests_running 4\nvllm:num_requests_waiting 9\nvllm:kv_cache_usage_perc 0.5\n"
    engine = FakeEngine("e", say_ok)
    engine.metrics = busy
    given = {"queue_policy": "fcfs", "metrics_interval": 0.05, "otlp_traces_endpoint": collector.url}
    async with rig(engine, **given) as it:
        await it.until(lambda: it.app.shared.fleet.router.table.num_waiting.values[0] == 9)
        caller = await it.caller()
        caller.ask(body={"messages": []})
        await asyncio.sleep(0.3)
        engine.metrics = busy.replace(b"waiting 9", b"waiting 1")
        assert (await caller.answer()).status == 200
        root, queue, attempt = await spans_of(it, collector, 3)
    assert (queue.name, queue.parent_id) == ("queue", root.span_id)
    assert 0.2 < queue.seconds <= root.seconds
    assert queue.end_ns <= attempt.begin_ns + 1_000_000
    assert attempt.attributes["moestro.engine.num_waiting"] == 1
    assert attempt.attributes["moestro.engine.num_running"] == 4


@looped
async def test_a_client_that_is_not_sampled_is_not_recorded_and_its_context_goes_on(collector):
    engine = FakeEngine("e", say_ok)
    async with rig(engine, otlp_traces_endpoint=collector.url) as it:
        await it.call(traceparent=PARENT[:-1] + "0")
        await it.call(traceparent="00-zz-1-01")
        root, _ = await spans_of(it, collector, 2)
    first, second = [parse_traceparent(request.header("traceparent")) for request in engine.received]
    assert f"{first.trace_id:032x}" == PARENT[3:35]
    assert not first.is_sampled
    assert f"{second.trace_id:032x}" == root.trace_id != PARENT[3:35]


@looped
async def test_refused_and_aborted_requests_have_an_ended_span(collector):
    async def hang(engine: FakeEngine, wire, request) -> None:
        await asyncio.sleep(60)

    engine = FakeEngine("e", hang)
    async with rig(engine, otlp_traces_endpoint=collector.url) as it:
        caller = await it.caller()
        caller.ask()
        await it.until(lambda: len(engine.received) == 1)
        caller.hang_up()
        root, attempt = await spans_of(it, collector, 2)
        assert (root.attributes["http.response.status_code"], root.error, attempt.error) == (499, "", "")
        it.engine("e").health.is_draining = True
        it.app.shared.fleet.look_now(it.engine("e"))
        assert (await it.call()).status == 503
        await it.call("/health", method="GET")  # the router's own answers have no span
        assert (await spans_of(it, collector, 3))[-1].error == "status 503"


@looped
async def test_without_a_collector_requests_are_served_at_once_and_the_log_is_short(caplog):
    caplog.set_level(logging.INFO)
    engine = FakeEngine("e", say_ok)
    async with rig(engine, otlp_traces_endpoint="http://127.0.0.1:1") as it:
        for _ in range(200):
            assert (await it.call()).status == 200
        await asyncio.sleep(0.5)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < 10
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) <= 3
    assert all(record.exc_info is None for record in lines)


@looped
async def test_a_collector_that_never_answers_costs_spans_and_no_request(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.is_slow = True
    engine = FakeEngine("e", say_ok)
    async with rig(engine, otlp_traces_endpoint=collector.url) as it:
        caller = await it.caller()
        begun_s = time.monotonic()
        for _ in range(300):
            caller.ask()
            assert (await caller.answer()).status == 200
        assert time.monotonic() - begun_s < 30
        assert collector.num_requests >= 1
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < 10


def test_off_imports_nothing_of_opentelemetry():
    code = "import moestro.gateway.app, moestro.server.server, sys; print([m for m in sys.modules if 'opentel' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("value", "context"),
    [
        (PARENT, TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_sampled=True)),
        ("cc" + PARENT[2:] + "-more", TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, True)),
        ("ff" + PARENT[2:], None),
        (PARENT + "-more", None),
        (PARENT.upper(), None),
        ("00-" + "0" * 32 + PARENT[35:], None),
        (PARENT[:36] + "0" * 16 + "-01", None),
        ("cc" + PARENT[2:] + "-" + "x" * 1000, None),
        ("", None),
        ("é", None),
    ],
)
def test_contexts_are_read_as_the_standard_says(value, context):
    assert parse_traceparent(value) == context
    if value == PARENT:
        assert context.header() == PARENT


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/other/v1/traces", "https://c/other/v1/traces"),
    ],
)
def test_endpoint_without_a_path_gets_that_of_otlp(endpoint, url):
    assert TracingSettings(otlp_traces_endpoint=endpoint).url == url


@pytest.mark.parametrize("endpoint", ["grpc://c:4317", "c:4318", "http://", "http://c:x", "http://[c", ""])
def test_wrong_endpoint_is_an_error(endpoint):
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*give http://HOST:4318"):
        TracingSettings(otlp_traces_endpoint=endpoint)
