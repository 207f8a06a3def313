"""Traces of `moestro serve`: spans of queue, prefill, decode and each preemption, received by a collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.otlp_collector import OtlpCollector, ReceivedSpan
from support.running import PATIENCE_S, Running, call, load, wait_until

from moestro.web.tracing import parse_traceparent

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
QLLM = ("--scheduling-policy", "qllm", "--evict-policy", "least_computed_be_first", "--max-num-seqs", "1")


@pytest.fixture(scope="module")
def traced(real_command, tmp_path_factory) -> Iterator[tuple[Running, OtlpCollector]]:
    with OtlpCollector().running() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        command = (*real_command, *QLLM, "--otlp-traces-endpoint", collector.url)
        server = Running(command, tmp_path_factory.mktemp("traced"))
        try:
            yield server, collector
            assert server.stop() == 0
        finally:
            server.kill()


def ask(server: Running, service_class: str, max_tokens: int, **headers: str):
    body = {"prompt": f"def f(x):  # {service_class}", "max_tokens": max_tokens, "ignore_eos": True}
    return call(server, "POST", "/v1/completions", body | {"service_class": service_class}, **headers)


def of_request(collector: OtlpCollector, answer_id: str) -> tuple[ReceivedSpan, dict[str, list[ReceivedSpan]]]:
    """The span of a request, and those below it by name."""
    wait_until(lambda: any(span.attributes["gen_ai.request.id"].startswith(answer_id) for span in roots(collector)))
    [root] = [span for span in roots(collector) if span.attributes["gen_ai.request.id"].startswith(answer_id)]
    children: dict[str, list[ReceivedSpan]] = {}
    for span in collector.spans:
        if span.parent_id == root.span_id:
            children.setdefault(span.name, []).append(span)
    return root, children


def roots(collector: OtlpCollector) -> list[ReceivedSpan]:
    return collector.named("llm_request")


def test_a_request_has_spans_for_queue_prefill_and_decode(traced):
    server, collector = traced
    answer = ask(server, "ls", 8, traceparent=PARENT)
    root, children = of_request(collector, answer.json["id"])
    context = parse_traceparent(PARENT)
    assert (int(root.trace_id, 16), int(root.parent_id, 16)) == (context.trace_id, context.span_id)
    assert (root.kind, root.service, root.error) == (2, "moestro-serve", "")
    assert children.keys() == {"queue", "prefill", "decode"}
    [queue], [prefill], [decode] = children["queue"], children["prefill"], children["decode"]
    assert root.begin_ns == queue.begin_ns
    assert queue.end_ns == prefill.begin_ns
    assert prefill.end_ns == decode.begin_ns
    assert decode.end_ns == root.end_ns
    usage = answer.json["usage"]
    wanted = {
        "gen_ai.request.model": answer.json["model"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "http.response.status_code": 200,
        "moestro.num_preemptions": 0,
        "moestro.engine": "engine 0",
    }
    assert wanted.items() <= root.attributes.items()
    assert root.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(queue.seconds + prefill.seconds)
    assert root.attributes["gen_ai.latency.e2e"] == pytest.approx(root.seconds)


def test_each_preemption_has_a_span_that_names_its_cause(traced):
    server, collector = traced
    replies: list = []
    batch = threading.Thread(target=lambda: replies.append(ask(server, "be", 400)))
    batch.start()
    wait_until(lambda: load(server)[0]["num_running"] == 1)
    urgent = ask(server, "ls", 4).json["id"]
    batch.join(PATIENCE_S)
    root, children = of_request(collector, replies[0].json["id"])
    preemptions = children["preempted"]
    assert len(preemptions) == root.attributes["moestro.num_preemptions"] >= 1
    assert preemptions[0].attributes["moestro.preemption.by"].startswith(urgent)
    assert preemptions[0].attributes["moestro.preemption.cause"] == "class"
    urgent_root, _ = of_request(collector, urgent)
    assert root.begin_ns < preemptions[0].begin_ns < urgent_root.end_ns
    assert all(root.begin_ns <= each.begin_ns <= each.end_ns <= root.end_ns for each in preemptions)


def test_a_client_that_is_not_sampled_has_no_spans(traced):
    server, collector = traced
    quiet = ask(server, "ls", 2, traceparent=PARENT[:-1] + "0").json["id"]
    of_request(collector, ask(server, "ls", 2).json["id"])
    assert not any(span.attributes["gen_ai.request.id"].startswith(quiet) for span in roots(collector))
