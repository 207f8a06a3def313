"""Which requests `moestro bench` asks for, by --dataset-name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moestro.errors import ConfigError
from moestro.loadgen.load import make_offsets, make_rows
from moestro.loadgen.settings import ArrivalSettings, RequestSettings

S = 1_000_000_000


@pytest.mark.parametrize("name", ["chat", "api_agent", "coder", "tool_agent"])
def test_sessions_are_generated_at_the_requested_rate(name):
    rows = make_rows(RequestSettings(dataset_name=name, num_prompts=300, seed=1), 5.0)
    assert len(rows) == 300
    assert rows.is_generated
    offsets = make_offsets(rows, ArrivalSettings(request_rate=5.0), 5.0, np.random.default_rng(0))
    assert offsets[-1] == 60 * S
    assert len(make_rows(RequestSettings(dataset_name=name), None)) == 200


def test_requests_are_drawn_from_servegens_clients(tmp_path):
    path = tmp_path / "clients.jsonl"
    lengths = {"input_tokens": {"12": 1.0}, "output_tokens": {"3": 1.0}}
    path.write_text(json.dumps({"client": 1, "trace": [[0, 0.5, 1, "Gamma", 1, 1]], "dataset": {"0": lengths}}))
    rows = make_rows(RequestSettings(dataset_name="servegen", dataset_path=path))
    assert len(rows) == 200
    assert set(rows.num_prompt_tokens) == {12}
    with pytest.raises(ConfigError, match="holds 300 requests: lower --num-prompts"):
        make_rows(RequestSettings(dataset_name="servegen", dataset_path=path, num_prompts=500))


def test_sharegpt_is_read_by_its_name_and_no_more_than_usual(tmp_path):
    path = tmp_path / "ShareGPT_V3.json.part"
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b" * 40}]
    path.write_text(json.dumps([{"conversations": turns}] * 300))
    rows = make_rows(RequestSettings(dataset_name="sharegpt", dataset_path=path))
    assert (rows.texts, set(rows.num_output_tokens)) == (("a?",) * 200, {10})
    assert len(make_rows(RequestSettings(dataset_name="sharegpt", dataset_path=path, num_prompts=7))) == 7
    with pytest.raises(ConfigError, match="holds 300 requests: lower --num-prompts"):
        make_rows(RequestSettings(dataset_name="sharegpt", dataset_path=path, num_prompts=301))
    with pytest.raises(ConfigError, match="--dataset-name sharegpt needs --dataset-path FILE"):
        RequestSettings(dataset_name="sharegpt")


def test_a_length_shape_is_drawn_from_the_whole_trace(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input_length,output_length\n" + "".join(f"{length},5\n" for length in range(1, 3001)))
    settings = RequestSettings(dataset_name="trace", dataset_path=path, num_prompts=500, length_shape="descending")
    assert make_rows(settings).num_prompt_tokens.mean() == pytest.approx(1000, rel=0.1)


def test_weibull_arrivals_are_offered():
    rows, rng = make_rows(RequestSettings(num_prompts=2000)), np.random.default_rng(0)
    offsets = make_offsets(rows, ArrivalSettings(request_rate=2.0, arrivals="weibull", burstiness=0.5), 2.0, rng)
    gaps = np.diff(offsets)
    assert offsets[-1] == pytest.approx(1000 * S)
    assert gaps.std() / gaps.mean() == pytest.approx(5**0.5, rel=0.15)


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset_name": "servegen"},
        {"dataset_name": "chat", "dataset_path": "x.jsonl"},
        {"length_shape": "central"},
    ],
)
def test_datasets_that_do_not_go_together_are_refused(fields):
    with pytest.raises(ConfigError, match="--dataset-name"):
        RequestSettings(**fields)
