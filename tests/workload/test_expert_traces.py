import io
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from moestro.errors import ConfigError
from moestro.workload.experts.expert_profile import read_expert_counts, read_routing

SHARED = Path(__file__).parents[3] / "shared" / "traces"
EXPERTS = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2) % 8
INDEX = [
    {"dataset": "gpqa", "category": "Physics", "num_tokens": 2, "offset": 0, "prompt_tokens": 9},
    {"dataset": "mmlu", "category": "Law", "num_tokens": 3, "offset": 2, "prompt_tokens": 4},
]


def write(folder, array, index=INDEX, name="e.npy"):
    packed = io.BytesIO()
    np.save(packed, array)
    data = packed.getvalue()
    experts, lines = folder / name, folder / "i.jsonl"
    experts.write_bytes(zstandard.compress(data) if name.endswith(".zst") else data)
    lines.write_text("".join(json.dumps(each) + "\n" for each in index))
    return experts, lines


@pytest.mark.parametrize("name", ["e.npy", "e.npy.zst"])
def test_routing_is_read_packed_or_not(tmp_path, name):
    trace = read_routing(*write(tmp_path, EXPERTS, name=name))
    assert (trace.experts == EXPERTS).all()
    assert trace.experts.dtype == np.uint8
    assert (trace.tokens_of(trace.generations[1]) == EXPERTS[2:]).all()
    assert trace.tokens_of(trace.generations[1]).base is not None, "a view, not a copy"


def test_choices_are_counted_by_layer(tmp_path):
    trace = read_routing(*write(tmp_path, EXPERTS))
    counts = trace.counts(8, slice(1, 4))
    assert counts.shape == (3, 8)
    for layer in range(3):
        assert counts[layer].tolist() == np.bincount(EXPERTS[1:4, layer].reshape(-1), minlength=8).tolist()


@pytest.mark.parametrize(
    ("array", "index", "words"),
    [
        (EXPERTS.astype(np.int64), INDEX, r"holds int64\[5, 3, 2\]: expected uint8"),
        (EXPERTS[0], INDEX, "expected uint8"),
        (np.asfortranarray(EXPERTS), INDEX, "in C order"),
        (EXPERTS, INDEX[:1], "must list the 5 tokens"),
        (EXPERTS, INDEX[::-1], "must list the 5 tokens"),
        (EXPERTS, [{"dataset": "x"}], "line 1: .*expected dataset, category, num_tokens"),
    ],
)
def test_a_trace_of_another_form_is_refused(tmp_path, array, index, words):
    with pytest.raises(ConfigError, match=words):
        read_routing(*write(tmp_path, array, index))


def test_a_file_that_is_cut_off_or_is_none_is_refused(tmp_path):
    experts, index = write(tmp_path, EXPERTS)
    experts.write_bytes(experts.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="4 bytes too early"):
        read_routing(experts, index)
    experts.write_bytes(b"no array")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_routing(experts, index)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_routing(tmp_path / "missing.npy", index)


def test_counts_are_read_by_checkpoint_and_domain(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"m": {"expert_counts": {"c4": [[1, 2], [3, 4]]}, "crosslayer": {"c4": [[[1, 0], [0, 2]]]}}}')
    found = read_expert_counts(path)["m"]
    assert found.by_domain["c4"].tolist() == [[1, 2], [3, 4]]
    assert found.next_layer["c4"].shape == (1, 2, 2)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="expected expert_counts"):
        read_expert_counts(path)


def test_the_published_routing_has_its_reported_skew():
    experts, index = SHARED / "gptoss20b_routing_experts_u8.npy.zst", SHARED / "gptoss20b_routing_index.jsonl.zst"
    if not experts.exists():
        pytest.skip(f"needs {experts.name}, which is not beside this checkout")
    trace = read_routing(experts, index)
    assert trace.experts.shape == (88_539, 24, 4)
    assert len(trace.generations) == 333
    counts = trace.counts(32)
    assert (counts.sum(1) == 88_539 * 4).all()
    imbalance = counts.max(1) / counts.mean(1)
    assert (imbalance.min(), imbalance.mean(), imbalance.max()) == pytest.approx((1.93, 2.80, 4.00), abs=0.01)


def test_the_published_counts_are_read_whole():
    path = SHARED / "olmoe_mixtral_expert_counts.json.zst"
    if not path.exists():
        pytest.skip(f"needs {path.name}, which is not beside this checkout")
    found = read_expert_counts(path)
    assert found["olmoe"].by_domain["github"].shape == (3, 64)
    assert found["mistral"].by_domain["github"].shape == (3, 8)
    assert found["olmoe"].next_layer["github"].shape == (2, 64, 64)
