"""How much host memory pays for a log, on a small network whose cache holds a part of the log's prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moestro.errors import ConfigError
from moestro.planner.divisions import HostMemoryAnswer, host_memory_that_pays
from moestro.planner.question import make_question
from moestro.planner.settings import HardwareSettings, PlanSettings, TrafficSettings

SMALL = {
    "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 8192, "vocab_size": 32000,
}  # fmt: skip
BLOCK, NUM_PREFIXES, PREFIX_BLOCKS = 64, 24, 30
MEMORY = 0.085  # of an H100: little for KV beside weights and workspace


def write_log(path: Path, **without: None) -> Path:
    """Prompts with prefixes that return in turn, so that a cache without room for all of them hits none."""
    lines = []
    for turn in range(6 * NUM_PREFIXES):
        first = turn % NUM_PREFIXES * PREFIX_BLOCKS
        ids = [*range(first, first + PREFIX_BLOCKS), 100_000 + turn]
        line = {"timestamp": turn * 200, "input_length": len(ids) * BLOCK, "output_length": 4, "hash_ids": ids}
        lines.append({name: value for name, value in line.items() if name not in without})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answer_of(folder: Path, most_gib: float | None, seconds: float = 1e9, **without: None) -> HostMemoryAnswer | None:
    (folder / "config.json").write_text(json.dumps(SMALL))
    hardware = HardwareSettings(gpu="h100", num_gpus=1, gpu_memory_utilization=MEMORY, max_kv_offloading_size=most_gib)
    traffic = TrafficSettings(dataset_path=write_log(folder / "log.jsonl", **without))
    question = make_question(PlanSettings(model=str(folder), hardware=hardware, traffic=traffic))
    return host_memory_that_pays(question, lambda: seconds)


def test_host_memory_that_holds_all_prefixes_pays_and_more_does_not(tmp_path):
    answer = answer_of(tmp_path, 64.0)
    assert answer is not None
    sizes, best = answer.sizes, answer.best
    assert sizes[0].gib == 0
    assert sizes[0].host_hits == 0
    assert best.gib > 0
    assert best.host_hits > 0.5
    assert best.ttft_ms < sizes[0].ttft_ms
    assert [each.ttft_ms * 0.95 <= min(size.ttft_ms for size in sizes) for each in sizes].index(True) == sizes.index(
        best
    )
    assert sizes[-1].gib < 64  # it ended where more memory changed no hit
    text = answer.sentences()[0]
    assert f"Host memory of {best.gib:.3g} GiB for each engine pays" in text
    assert "144 requests on 1 replicas" in text


def test_a_limit_below_what_pays_is_tried_and_the_time_may_cut_the_answer(tmp_path):
    answer = answer_of(tmp_path, 0.01)
    assert answer is not None
    assert [each.gib for each in answer.sizes] == [0.0, 0.01]
    assert answer.best.gib == 0
    assert answer.sentences()[0].startswith("No host memory pays")
    cut = answer_of(tmp_path, 64.0, seconds=0.0)
    assert cut is not None
    assert len(cut.sizes) == 1
    assert "raise --time" in cut.sentences()[1]


def test_it_is_not_answered_unless_requested(tmp_path):
    assert answer_of(tmp_path, None) is None


def test_a_log_that_cannot_tell_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not say what prompts share"):
        answer_of(tmp_path, 8.0, hash_ids=None)
    question = make_question(PlanSettings(model="qwen3-30b-a3b", hardware=HardwareSettings(max_kv_offloading_size=8.0)))
    with pytest.raises(ConfigError, match="give --dataset-path"):
        host_memory_that_pays(question, lambda: 1.0)
    large = replace(question.settings, hardware=HardwareSettings(gpu="a100-40g", max_kv_offloading_size=8.0))
    with pytest.raises(ConfigError, match="does not fit one a100-40g"):
        host_memory_that_pays(make_question(large), lambda: 1.0)
