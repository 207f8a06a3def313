import json
from pathlib import Path

import numpy as np
import pytest

from moestro.errors import ConfigError
from moestro.workload.traces.servegen import Span, draw_requests, read_clients

SHARED = Path(__file__).parents[3] / "shared" / "traces" / "servegen_deepseek_r1.jsonl.zst"
S = 1_000_000_000


def client(number, *windows, lengths=((100, 1.0),)):
    table = {str(tokens): share for tokens, share in lengths}
    dataset = {"0": {"input_tokens": table, "output_tokens": {"7": 0.5, "9": 0.5}, "reason_ratio": {}}}
    return {
        "client": number,
        "trace": list(windows),
        "dataset": dataset | {"21600": {"input_tokens": {}, "output_tokens": {}}},
    }


@pytest.fixture
def clients(tmp_path):
    def write(*lines):
        path = tmp_path / "clients.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_clients(path)

    return write


def test_a_client_sends_as_many_requests_in_each_stretch_as_it_did(clients):
    found = clients(
        client(3, [0, 0.5, 1.0, "Gamma", 1.0, 2.0], [1200, 0.25, 2.0, "Weibull", 0.6, 1.0]),
        client(4, [600, 0.1, 3.0, "Gamma", 0.1, 1.0]),
    )
    rows = draw_requests(found, Span(duration_s=1800), 0)
    since = rows.timestamp_ns + 0  # from the first request on
    assert (np.diff(since) >= 0).all()
    assert since[0] == 0
    assert rows.is_generated
    assert np.bincount(rows.user).tolist() == [0, 0, 0, 300 + 150, 60]
    assert set(rows.num_prompt_tokens) == {100}
    assert rows.num_output_tokens.mean() == pytest.approx(8, abs=0.2)
    assert len(draw_requests(found, Span(duration_s=600), 0)) == 300
    assert len(draw_requests(found, Span(start_s=600, duration_s=600, factor=0.5), 0)) == 30


@pytest.mark.parametrize(
    ("pattern", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Gamma", 4.0, 0.5), ("Weibull", 0.6, 1.76)]
)
def test_gaps_are_of_the_clients_pattern(clients, pattern, shape, cv):
    found = clients(client(0, [0, 40.0, 0.0, pattern, shape, 1.0]))
    gaps = np.diff(draw_requests(found, Span(duration_s=600), 1).timestamp_ns)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_lengths_follow_the_histograms_and_not_each_other(clients):
    lengths = [(10, 0.2), (1000, 0.8)]
    rows = draw_requests(clients(client(0, [0, 20.0, 1.0, "Gamma", 1.0, 1.0], lengths=lengths)), Span(), 2)
    assert (rows.num_prompt_tokens == 10).mean() == pytest.approx(0.2, abs=0.01)
    assert abs(np.corrcoef(rows.num_prompt_tokens, rows.num_output_tokens)[0, 1]) < 0.03


def test_a_client_without_lengths_at_that_hour_keeps_its_last(clients):
    rows = draw_requests(clients(client(0, [22_200, 1.0, 1.0, "Gamma", 1.0, 1.0])), Span(start_s=22_200), 0)
    assert set(rows.num_prompt_tokens) == {100}


def test_the_same_seed_gives_the_same_requests_whatever_span_is_drawn_around_them(clients):
    found = clients(client(0, *([600 * i, 0.2, 1.0, "Gamma", 0.5, 1.0] for i in range(4))))
    long, short = (draw_requests(found, Span(start_s=600, duration_s=length), 5) for length in (1800, 600))
    assert (np.diff(long.timestamp_ns[: len(short)]) == np.diff(short.timestamp_ns)).all()
    assert (draw_requests(found, Span(start_s=600), 6).timestamp_ns[:50] != long.timestamp_ns[:50]).any()


@pytest.mark.parametrize("wrong", [{"start_s": -1}, {"duration_s": 0}, {"factor": 0}])
def test_a_span_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="a span of ServeGen's day"):
        Span(**wrong)


def test_other_files_and_silent_hours_are_refused(clients):
    with pytest.raises(ConfigError, match=r"line 1: .*expected a client of ServeGen"):
        clients({"client": 1})
    with pytest.raises(ConfigError, match=r"line 1: .*expected a client of ServeGen"):
        clients(client(0, [0, 1.0, 1.0, "Pareto", 1.0, 1.0]))
    with pytest.raises(ConfigError, match="holds no clients"):
        clients()
    with pytest.raises(ConfigError, match="no client sends requests from second 0"):
        draw_requests(clients(client(0, [1200, 1.0, 1.0, "Gamma", 1.0, 1.0])), Span(duration_s=600), 0)


def test_the_published_clients_ask_as_often_as_they_did():
    if not SHARED.exists():
        pytest.skip(f"needs {SHARED.name}, which is not beside this checkout")
    found = read_clients(SHARED)
    assert len(found) == 73
    requested = sum(window.rate * 600 for each in found for window in each.trace if 36_000 <= window.start_s < 39_600)
    rows = draw_requests(found, Span(start_s=36_000), 0)
    assert len(rows) == pytest.approx(requested, abs=5)
    assert rows.timestamp_ns[-1] < 3600 * S
    assert len(np.unique(rows.user)) > 20
