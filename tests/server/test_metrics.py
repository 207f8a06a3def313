"""What is counted, under the names that dashboards ask for."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.running import call, complete, metrics, open_stream, wait_until

from moestro.core.load_figures import LoadFigures, PassCounts
from moestro.core.request import FinishReason, ServiceClass
from moestro.server.engines.request_state import Metrics
from moestro.server.figures.statistics import StatLines
from moestro.web.figures import Histogram

# Of the dashboards that are in use (production-stack's, AIBrix', the Gateway API's picker).
VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:request_success", "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_inference_time_seconds",
    "vllm:request_prefill_kv_computed_tokens", "vllm:request_params_max_tokens", "vllm:request_params_n",
    "vllm:request_num_preemptions",
    "vllm:request_max_num_generation_tokens", "vllm:prompt_tokens_cached", "vllm:prompt_tokens_by_source",
    "vllm:num_requests_waiting_by_reason", "vllm:corrupted_requests", "vllm:iteration_tokens_total",
}  # fmt: skip
OWN_NAMES = {
    "moestro:engine_ready", "moestro:engine_restarts", "moestro:engine_stalls", "moestro:messages_dropped",
    "moestro:requests_moved", "moestro:requests_refused", "moestro:batch_passes", "moestro:withdrawals",
    "moestro:passed_over_seconds", "moestro:parked_tokens", "moestro:parked_tokens_max",
    "process_resident_memory_bytes",
}  # fmt: skip


def test_the_names_of_dashboards_and_our_own_are_there_with_model_and_engine(fake):
    reply = call(fake, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(reply.body.decode())}
    ours = {name.replace("vllm:", "moestro:") for name in VLLM_NAMES}
    assert families.keys() >= VLLM_NAMES | ours | OWN_NAMES
    for name in VLLM_NAMES:
        for sample in families[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("moestro-demo", "0")
    [cache] = families["vllm:cache_config_info"].samples
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "1024")


def test_sizes_of_prompts_and_their_choices_are_counted_once_for_each_prompt(fake):
    before = metrics(fake)
    assert complete(fake, prompt=[[10, 11, 12], [13, 14]], n=3, max_tokens=4).status == 200
    after = metrics(fake)
    prefix, labels = "vllm:", '{engine="0"}'

    def grown(name: str) -> float:
        return after[f"{prefix}{name}{labels}"] - before[f"{prefix}{name}{labels}"]

    assert (grown("request_params_n_count"), grown("request_params_n_sum")) == (2, 6)
    assert (grown("request_max_num_generation_tokens_count"), grown("request_max_num_generation_tokens_sum")) == (2, 8)
    assert (grown("request_params_max_tokens_count"), grown("request_params_max_tokens_sum")) == (6, 24)
    assert grown("request_inference_time_seconds_count") == 6
    assert (grown("request_num_preemptions_count"), grown("request_num_preemptions_sum")) == (6, 0)
    cached, computed = (
        after[f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}}']
        - before[f'vllm:prompt_tokens_by_source_total{{engine="0",source="{source}"}}']
        for source in ("local_cache_hit", "local_compute")
    )
    assert cached == grown("prompt_tokens_cached_total")
    assert cached + computed == grown("prompt_tokens_total") == 15
    assert grown("request_prefill_kv_computed_tokens_sum") == computed
    assert grown("iteration_tokens_total_sum") == 15 + 24
    assert 4 <= grown("iteration_tokens_total_count") <= 24


def test_a_full_queue_is_a_rejection_by_vllms_name(fake):
    assert 'vllm:admission_rejections_total{,reason="max_num_queued_reqs"}' in metrics(fake)


def test_the_load_header_comes_in_the_requested_form(fake):
    paths = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in paths.items():
        for stream in (False, True):
            for form in ("TEXT", "text"):
                answer = call(fake, "POST", path, body | {"stream": stream}, endpoint_load_metrics_format=form)
                found = re.fullmatch(
                    r"TEXT named_metrics\.kv_cache_usage_perc=([\d.]+), named_metrics\.num_requests_waiting=([\d.]+)",
                    answer.headers["endpoint-load-metrics"],
                )
                assert found is not None
                assert 0 <= float(found[1]) <= 1
                assert float(found[2]) == 0
            answer = call(fake, "POST", path, body | {"stream": stream}, endpoint_load_metrics_format="JSON")
            kind, _, text = answer.headers["endpoint-load-metrics"].partition(" ")
            assert kind == "JSON"
            assert json.loads(text)["named_metrics"].keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
            for other in ({}, {"endpoint_load_metrics_format": "BIN"}, {"endpoint_load_metrics_format": ""}):
                assert "endpoint-load-metrics" not in call(fake, "POST", path, body, **other).headers


def test_a_router_that_asks_gets_the_figures_of_metrics_with_each_answer(fake):
    body = {"prompt": "hi", "max_tokens": 4}
    for stream in (False, True):
        answer = call(fake, "POST", "/v1/completions", body | {"stream": stream}, x_moestro_load="1")
        report = json.loads(answer.headers["x-moestro-load"])
        assert 0 <= report["age_us"] < 60_000_000
        load = report["load"]
        assert load.keys() >= {"num_running", "num_waiting", "kv_usage", "queued_prefill_tokens", "num_tokens"}
        assert load["num_waiting"] == 0
        assert 0 <= load["kv_usage"] <= 1
        assert "x-moestro-load" not in call(fake, "POST", "/v1/completions", body | {"stream": stream}).headers


def test_a_stream_s_load_is_that_of_its_first_byte(fake):
    """One request runs, so the header of a second one counts itself or the first; an idle server has none."""
    connection = open_stream(fake, max_tokens=400)
    try:
        wait_until(lambda: metrics(fake)['moestro:num_requests_running{engine="0"}'] >= 1)
        answer = call(
            fake, "POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True}, x_moestro_load="1"
        )
        assert json.loads(answer.headers["x-moestro-load"])["load"]["num_running"] >= 1
    finally:
        connection.close()


def test_head_answers_as_get_does_without_a_body(fake):
    reply = call(fake, "HEAD", "/metrics")
    assert (reply.status, reply.body) == (200, b"")


def test_latencies_are_by_class_under_our_names_and_in_one_under_vllms(fake):
    """A dashboard that was made for vLLM sees the series that it knows: those of all classes together."""
    names = ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "request_queue_time_seconds")
    before = metrics(fake)
    for service_class, times in (("ls", 1), ("be", 3)):
        for _ in range(times):
            assert complete(fake, max_tokens=3, service_class=service_class).status == 200
    after = metrics(fake)
    for name in names:
        keys = [f'moestro:{name}_count{{engine="0",service_class="{each}"}}' for each in ("ls", "be")]
        keys.append(f'vllm:{name}_count{{engine="0"}}')
        assert [after[key] - before[key] for key in keys] == [1, 3, 4], name
        sums = [after[key] for key in after if key.startswith(f"moestro:{name}_sum{{")]
        assert sum(sums) == pytest.approx(after[f'vllm:{name}_sum{{engine="0"}}'])


def test_a_request_moves_the_figures_by_what_it_was(fake):
    def gained() -> dict[str, float]:
        after = metrics(fake)
        return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}

    before = metrics(fake)
    usage = complete(fake, max_tokens=5).json["usage"]
    complete(fake, prompt="one two three four", stop=" three", max_tokens=500)
    complete(fake, temperature=3)
    open_stream(fake, max_tokens=4000).close()
    name = 'vllm:request_success_total{engine="0",finished_reason="%s"}'
    wait_until(lambda: name % "abort" in gained())
    found = gained()
    assert [found[name % reason] for reason in ("length", "stop", "abort")] == [1, 1, 1]
    assert found['moestro:requests_refused_total{reason="invalid_value"}'] == 1
    assert found['vllm:time_to_first_token_seconds_count{engine="0"}'] == 3
    assert found['vllm:e2e_request_latency_seconds_count{engine="0"}'] == 2
    assert found['vllm:request_queue_time_seconds_count{engine="0"}'] == 3
    assert found['vllm:request_prompt_tokens_sum{engine="0"}'] > usage["prompt_tokens"]
    assert found['vllm:request_generation_tokens_count{engine="0"}'] == 2
    assert found['vllm:request_decode_time_seconds_sum{engine="0"}'] > 0
    assert found['vllm:generation_tokens_total{engine="0"}'] > usage["completion_tokens"]
    assert found['vllm:prompt_tokens_total{engine="0"}'] > usage["prompt_tokens"]
    assert found['vllm:prefix_cache_queries_total{engine="0"}'] > 0


def test_law_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it():
    rng = random.Random(0)
    bounds = (0.1, 1.0, 10.0)
    histogram = Histogram(bounds)
    values = [rng.choice([rng.expovariate(0.5), *bounds, 0.0]) for _ in range(1000)]
    for value in values:
        histogram.observe(value)
    for i in range(len(bounds)):
        assert sum(histogram.counts[: i + 1]) == sum(value <= bounds[i] for value in values)
    assert sum(histogram.counts) == len(values)
    assert bisect_left(bounds, 10.0) == 2
    assert abs(histogram.total - sum(values)) < 1e-6


class FakeEngines:
    loads = (LoadFigures(), LoadFigures())


def test_the_stats_line_tells_what_happened_since_the_last_one_and_is_silent_without_traffic():
    engines, counted = FakeEngines(), Metrics(2)
    lines = StatLines(engines, counted)
    assert lines.lines(10.0) == []
    counted.engines[1].num_prompt_tokens, counted.engines[1].num_generated_tokens = 1000, 50
    engines.loads = (
        LoadFigures(),
        LoadFigures(num_running=3, kv_usage=0.25, num_queried_tokens=200, num_hit_tokens=150),
    )
    assert lines.lines(10.0) == [
        "engine 1: running 3, waiting 0, KV 25.0%, prefix hits 75%, tokens/s in 100.0, out 5.0"
    ]
    figures = counted.engines[1]
    for seconds in (0.010, 0.030):
        figures.first_token_s[ServiceClass.LS].observe(seconds)
        figures.mean_gap_s[ServiceClass.LS].observe(seconds / 10)
        figures.queue_s[ServiceClass.BE].observe(1000 * seconds)
    passes = PassCounts(num_passes=7, passed_over_ns=2_500_000_000)
    engines.loads = (LoadFigures(), LoadFigures(num_queried_tokens=200, num_hit_tokens=150, pass_counts=passes))
    [line] = lines.lines(10.0)
    assert line.endswith("; ls TTFT 20 ms, TPOT 2 ms; be queue 20.0 s; 7 passes in 2.5 s")
    engines.loads = (LoadFigures(), LoadFigures())  # it was started again
    counted.engines[1].ended[FinishReason.ERROR] += 1
    assert lines.lines(10.0) == ["engine 1: running 0, waiting 0, KV 0.0%, tokens/s in 0.0, out 0.0"]
    assert lines.lines(10.0) == []
