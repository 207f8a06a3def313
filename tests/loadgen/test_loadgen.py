"""`moestro bench` against endpoints with set answers: what is counted, what is sent, and when."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from loadgen.endpoint import (
    MODEL,
    Endpoint,
    busy,
    error_event,
    one_token_short,
    page,
    queued,
    reset,
    whole,
    without_finish_reason,
    without_usage,
)
from rich.console import Console

import moestro.workload.run_records
from moestro.cli import main
from moestro.errors import ConfigError, MoestroError
from moestro.loadgen.client import BenchClient
from moestro.loadgen.drawing import save_plot
from moestro.loadgen.runner import BenchOutcome, bench
from moestro.loadgen.settings import (
    ArrivalSettings,
    BenchSettings,
    EndpointSettings,
    GoalSettings,
    RequestSettings,
    ResultSettings,
)
from moestro.workload.run_records import Verdict

SMALL = RequestSettings(num_prompts=12, random_input_len=20, random_output_len=5, vocab_size=100)


def settings(endpoint: Endpoint, /, **parts) -> BenchSettings:
    given = {"endpoint": EndpointSettings(base_url=endpoint.url), "requests": SMALL} | parts
    return BenchSettings(**{"arrivals": ArrivalSettings(num_warmups=1)} | given)


def run(endpoint: Endpoint, /, **parts) -> tuple[BenchOutcome, str]:
    console = Console(file=io.StringIO(), width=200)
    measured = bench(settings(endpoint, **parts), console)
    return measured, console.file.getvalue()


def test_the_times_of_a_trace_without_hash_ids_are_replayed(tmp_path):
    path = tmp_path / "times.jsonl"
    row = {"input_length": 8, "output_length": 5, "chat_id": 1}
    path.write_text("".join(json.dumps(row | {"timestamp": 200 * number}) + "\n" for number in range(4)))
    with Endpoint(whole()) as endpoint:
        measured, shown = run(
            endpoint,
            requests=RequestSettings(dataset_name="trace", dataset_path=path, vocab_size=100),
            results=ResultSettings(json=tmp_path / "r.json", save_detailed=True),
        )
    offsets = measured.result.requests["arrival_ms"]
    assert np.diff(offsets).tolist() == pytest.approx([200] * 3)
    assert "trace          fields of the file that have no effect beside its other fields: chat_id" in shown
    assert json.loads((tmp_path / "r.json").read_text())["notes"]


def test_every_way_to_fail_is_counted_under_its_own_name():
    behaviours = [
        whole(), without_usage, without_finish_reason, error_event, busy, whole(30), reset, page, one_token_short
    ]  # fmt: skip
    with Endpoint(*behaviours) as endpoint:
        measured, shown = run(
            endpoint,
            endpoint=EndpointSettings(base_url=endpoint.url, timeout=8.0),
            requests=replace(SMALL, num_prompts=18),
        )
    report = measured.result.report
    assert {word: failure.count for word, failure in report.failures.items()} == dict.fromkeys(
        ("no_usage", "no_finish_reason", "error_event", "http_503", "timeout", "connection", "no_stream"), 2
    )
    assert report.failures["error_event"].example == "the engine died"
    assert report.failures["http_503"].example == "The queue is full."
    assert "2 http_503: The queue is full." in shown
    assert report.num_ok == 4
    assert report.num_wrong_length == 2
    assert report.num_output_tokens == 2 * 5 + 2 * 4
    assert report.num_input_tokens == 4 * 20
    assert report.cached_share == pytest.approx(0.1)
    assert report.ttft_ms.p99 < 8000, "the failed ones' times are not among the latencies"


def test_a_body_asks_for_exact_length_usage_and_token_ids_of_no_other_request():
    with Endpoint(whole()) as endpoint:
        run(endpoint)
    body = endpoint.bodies[-1]
    prompt = body.pop("prompt")
    assert body == {
        "model": MODEL,
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert len(prompt) == 20
    assert all(0 <= token_id < 100 for token_id in prompt)
    prompts = {tuple(body.get("prompt", prompt)) for body in endpoint.bodies}
    assert len(prompts) == 13, "12 of the run and 1 of the warm-up"
    assert len(set(endpoint.ids)) == 13


def test_a_chat_sends_words_and_no_ignore_eos_is_left_out_on_request():
    async def chat(_, http, body):
        body |= {"prompt": body["messages"][0]["content"].split(), "max_tokens": body["max_completion_tokens"]}
        return await whole()(_, http, body)

    with Endpoint(chat) as endpoint:
        where = EndpointSettings(base_url=f"{endpoint.url}/v1/", endpoint_type="chat")
        measured, _ = run(endpoint, endpoint=where, requests=replace(SMALL, ignore_eos=False, temperature=0.7))
    assert measured.result.report.num_ok == 12
    assert measured.result.report.num_input_tokens == 12 * 20
    assert "ignore_eos" not in endpoint.bodies[0]
    assert all(body["temperature"] == 0.7 for body in endpoint.bodies)


def test_open_load_never_waits_and_closed_load_keeps_to_its_bound():
    with Endpoint(whole(0.3)) as endpoint:
        run(endpoint, arrivals=ArrivalSettings(request_rate=200, num_warmups=0))
        assert endpoint.most_in_flight == 12
        endpoint.most_in_flight = 0
        run(endpoint, arrivals=ArrivalSettings(max_concurrency=4, num_warmups=0))
        assert endpoint.most_in_flight == 4


def test_objects_that_the_caller_froze_stay_frozen():
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    with Endpoint(whole()) as endpoint:
        run(endpoint)
    assert gc.get_freeze_count() > 0.9 * num_frozen


def test_latency_counts_from_the_scheduled_arrival_also_while_the_client_holds_a_request_back():
    with Endpoint(whole(0.04)) as endpoint:
        held = ArrivalSettings(request_rate=1000, arrivals="constant", max_concurrency=1, num_warmups=0)
        measured, _ = run(endpoint, arrivals=held)
        lines = measured.records.timelines
        assert np.diff(lines.arrival_ns).tolist() == [1_000_000] * 11, "a rate is a schedule"
        assert measured.result.report.ttft_ms.p99 > 400, "the last one waited for eleven"
        assert np.median(measured.records.late_ns) < np.median(lines.ttft_ns) / 2, "a wait for a turn is not slowness"
        closed, _ = run(endpoint, arrivals=ArrivalSettings(max_concurrency=1, num_warmups=0))
        lines = closed.records.timelines
        assert np.all(lines.arrival_ns[1:] >= lines.last_token_ns[:-1]), "without a rate an arrival is its turn"


def test_requests_are_sent_in_order_and_warm_up_is_not_counted():
    with Endpoint(whole()) as endpoint:
        measured, _ = run(endpoint, arrivals=ArrivalSettings(max_concurrency=1, num_warmups=3))
    assert sorted(endpoint.ids[:3]) == ["bench-0-0-0", "bench-0-0-1", "bench-0-0-2"]
    assert endpoint.ids[3:] == [f"bench-0-1-{i}" for i in range(12)]
    assert measured.result.report.num_requests == 12


def test_nothing_runs_when_no_warm_up_request_is_answered():
    with Endpoint(busy) as endpoint:
        with pytest.raises(MoestroError, match=r"no warm-up request was answered: http_503: The queue is full\."):
            run(endpoint)
        assert len(endpoint.bodies) == 1


def test_a_run_without_any_answer_fails_after_its_figures_are_shown_and_written(tmp_path):
    with Endpoint(busy) as endpoint:
        console = Console(file=io.StringIO(), width=200)
        given = settings(
            endpoint,
            arrivals=ArrivalSettings(num_warmups=0),
            results=ResultSettings(json=tmp_path / "r.json", save_detailed=True),
        )
        with pytest.raises(MoestroError, match="no request was answered"):
            bench(given, console)
    assert "12 http_503" in console.file.getvalue()
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["report"]["failures"] == {"http_503": {"count": 12, "example": "The queue is full."}}
    assert written["requests"]["first_token_ms"] == [None] * 12


def test_the_result_names_its_conditions_and_hides_the_key(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bin/moestro", "bench", "--api-key", "sesame", "--api-key=sesame", "--seed", "0"])
    with Endpoint(whole(), key="sesame") as endpoint:
        run(
            endpoint,
            endpoint=EndpointSettings(base_url=endpoint.url, api_key="sesame"),
            results=ResultSettings(json=tmp_path / "r.json", plot=tmp_path / "r.png"),
        )
    text = (tmp_path / "r.json").read_text()
    assert "sesame" not in text
    conditions = json.loads(text)["conditions"]
    assert conditions["kind"] == "measured"
    assert conditions["command"] == "moestro bench --api-key *** --api-key=*** --seed 0"
    assert conditions["model"] == MODEL
    assert conditions["machine"]
    assert json.loads(text)["settings"]["requests"]["seed"] == 0


def test_the_highest_rate_is_found_where_latency_grows_with_the_load(tmp_path, monkeypatch):
    monkeypatch.setattr(moestro.workload.run_records, "MAX_LATE_MS", math.inf)  # client and server share this process
    with Endpoint(queued(0.02)) as endpoint:  # holds up to 50 requests a second
        measured, shown = run(
            endpoint,
            requests=replace(SMALL, num_prompts=20, random_output_len=1),
            arrivals=ArrivalSettings(request_rate=20, arrivals="constant", num_warmups=0),
            goals=GoalSettings(goodput=("ttft:150",), find_rate=True, rate_tolerance=0.5, max_probes=4),
        )
        save_plot(tmp_path / "search.png", measured)
    found, probes = measured.result.found, measured.result.probes
    assert probes[0].rate == 20
    verdicts = {probe.rate: probe.verdict for probe in probes}
    assert verdicts[found.rate] is Verdict.HOLDS
    assert verdicts[found.above] is Verdict.FAILS
    assert found.rate < 160, "far beyond 50/s the 20th request waits longer than the objective"
    assert measured.result.report.goodput.share >= 0.9
    assert shown.count("requests/s: ") == len(probes) + 1
    assert len({tuple(body["prompt"]) for body in endpoint.bodies}) == 20 * len(probes), "no probe warms the next one"
    assert (tmp_path / "search.png").stat().st_size > 1000


def test_a_search_without_a_start_begins_at_what_the_warm_up_reached():
    with Endpoint(whole(0.1)) as endpoint:
        measured, _ = run(
            endpoint,
            requests=replace(SMALL, num_prompts=2),
            arrivals=ArrivalSettings(num_warmups=2),
            goals=GoalSettings(goodput=("e2e:5000",), find_rate=True, max_probes=1),
        )
    assert 1 < measured.result.probes[0].rate <= 20


def test_what_the_context_cannot_hold_is_refused_or_left_out_but_never_cut(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("input_length,output_length\n10,2\n3000,2\n20,3\n")
    requests = RequestSettings(dataset_name="trace", dataset_path=trace)
    with Endpoint(whole()) as endpoint:
        with pytest.raises(ConfigError, match="1 of 3 requests need more than the model's 2048 tokens"):
            run(endpoint, requests=requests)
        measured, shown = run(endpoint, requests=replace(requests, skip_too_long=True))
    assert measured.result.num_skipped == 1
    assert "1 requests longer" in shown
    assert measured.result.report.num_input_tokens == 30


def test_a_trace_is_replayed_in_its_own_time_or_at_a_rate(tmp_path):
    trace = tmp_path / "t.jsonl"
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 2, "hash_ids": [7, {}]}}\n'
    trace.write_text("".join(line.format(i * 50, i) for i in range(4)))
    requests = RequestSettings(dataset_name="trace", dataset_path=trace)
    with Endpoint(whole()) as endpoint:
        own, _ = run(endpoint, requests=requests, arrivals=ArrivalSettings(num_warmups=0))
        prompts = [body["prompt"] for body in endpoint.bodies]
        fast, _ = run(endpoint, requests=requests, arrivals=ArrivalSettings(num_warmups=0, rate_factor=5))
        rated, _ = run(endpoint, requests=requests, arrivals=ArrivalSettings(num_warmups=0, request_rate=100))
    gaps = [np.diff(each.records.timelines.arrival_ns).tolist() for each in (own, fast, rated)]
    assert gaps[0] == [50_000_000] * 3
    assert gaps[1] == [10_000_000] * 3
    assert sum(gaps[2]) == pytest.approx(40_000_000, abs=3)
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1, "equal ids are equal blocks"
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 4


def test_a_result_with_generated_sessions_says_so():
    requests = RequestSettings(dataset_name="api_agent", num_prompts=20, skip_too_long=True)
    with Endpoint(whole()) as endpoint:
        measured, shown = run(endpoint, requests=requests, arrivals=ArrivalSettings(request_rate=1000, num_warmups=0))
    assert measured.result.is_generated
    assert "generated, not recorded" in shown
    assert measured.result.report.num_ok + measured.result.num_skipped == 20


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"base_url": "http://127.0.0.1:9"}, "no server answers at .*--base-url"),
        ({"model": "other"}, f"serves {MODEL}: give one as --model"),
        ({"api_key": None}, "needs a key: set MOESTRO_API_KEY"),
    ],
)
def test_an_unreachable_endpoint_is_the_operators_to_put_right(where, words):
    with Endpoint(whole(), key="sesame") as endpoint, pytest.raises(ConfigError, match=words):
        run(endpoint, endpoint=EndpointSettings(**{"base_url": endpoint.url, "api_key": "sesame"} | where))


def test_the_flag_of_the_model_is_that_of_the_command_and_a_length_may_be_text(monkeypatch):
    async def find(model):
        async with BenchClient(EndpointSettings(base_url=endpoint.url, model=model)) as client:
            return await client.find_endpoint("--served-model")

    monkeypatch.setattr("loadgen.endpoint.MAX_MODEL_LEN", "2048")
    with Endpoint(whole()) as endpoint:
        assert asyncio.run(find(None)).max_model_len == 2048
        with pytest.raises(ConfigError, match="give one as --served-model"):
            asyncio.run(find("other"))


def test_a_server_without_models_is_refused():
    with Endpoint(whole()) as endpoint, pytest.raises(ConfigError, match="answers 404 and no list of models"):
        run(endpoint, endpoint=EndpointSettings(base_url=f"{endpoint.url}/elsewhere"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (EndpointSettings, {"base_url": "localhost:8000"}),
        (EndpointSettings, {"timeout": 0.0}),
        (RequestSettings, {"num_prompts": 0}),
        (RequestSettings, {"dataset_name": "trace"}),
        (ArrivalSettings, {"request_rate": 0.0}),
        (ArrivalSettings, {"request_rate": math.nan}),
        (ArrivalSettings, {"max_concurrency": 0}),
        (ArrivalSettings, {"burstiness": 2.0, "arrivals": "constant"}),
        (ArrivalSettings, {"rate_factor": 2.0, "request_rate": 1.0}),
        (GoalSettings, {"find_rate": True}),
        (GoalSettings, {"slo_share": 1.5}),
        (ResultSettings, {"save_detailed": True}),
        (BenchSettings, {"arrivals": ArrivalSettings(arrivals="trace")}),
    ],
)
def test_impossible_settings_are_refused_when_made(kind, fields):
    with pytest.raises(ConfigError, match=r"--\w"):
        kind(**fields)


@pytest.mark.parametrize("name", ["missing/r.png", "r.gif", "r"])
def test_a_picture_that_could_not_be_written_is_refused_at_once(tmp_path, name):
    with pytest.raises(ConfigError, match="--plot"):
        ResultSettings(plot=tmp_path / name)


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it was not installed
    with Endpoint(whole()) as endpoint, pytest.raises(SystemExit) as caught:
        main(["bench", "--base-url", endpoint.url, "--plot", str(tmp_path / "r.png")])
    assert caught.value.code == 2
    assert "pip install 'moestro[plots]'" in capsys.readouterr().err
    assert endpoint.bodies == []
