"""A profile from any of its forms: vLLM's responses, choices per token, counts; and what is refused."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from moestro.errors import ConfigError
from moestro.workload.experts.expert_profile import write_profile
from moestro.workload.experts.profile_readers import ProfileReading, read_profile
from moestro.workload.experts.sglang_dumps import deal_to_steps, load_of_tokens

READING = ProfileReading(num_experts=6, tokens_per_step=8)


def choices(num_tokens: int = 40, seed: int = 0, num_layers: int = 3) -> np.ndarray:
    """uint8[tokens, layers, 2], two different experts of six for each token and layer."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (num_tokens, num_layers, 1)), axis=2)[:, :, :2]


def packed(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def text(array: np.ndarray) -> str:
    return base64.b64encode(packed(array)).decode()


def same_load(profile, *recordings: np.ndarray) -> None:
    wanted = load_of_tokens(deal_to_steps(recordings, 8), 6)
    for name in ("tokens", "variance", "activated"):
        assert getattr(profile.load, name) == pytest.approx(getattr(wanted, name))
    assert profile.load.pairs.count == pytest.approx(wanted.pairs.count)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("is_zst", [False, True])
def test_choices_per_token_are_read_packed_or_not(tmp_path, kind, is_zst):
    data = packed(choices().astype(kind))
    (tmp_path / "e").write_bytes(zstandard.compress(data) if is_zst else data)
    profile = read_profile([tmp_path / "e"], READING)
    same_load(profile, choices())
    assert profile.layers == (0, 1, 2)
    assert any("steps of 8 " in note for note in profile.notes)


def test_each_file_of_choices_is_a_source(tmp_path):
    for seed in range(2):
        (tmp_path / f"{seed}.npy").write_bytes(packed(choices(30 + seed, seed)))
    profile = read_profile([tmp_path / "0.npy", tmp_path / "1.npy"], READING)
    same_load(profile, choices(30, 0), choices(31, 1))


def test_a_guessed_number_of_experts_is_noted(tmp_path):
    (tmp_path / "e").write_bytes(packed(choices()))
    profile = read_profile([tmp_path / "e"], ProfileReading())
    assert profile.num_experts == 6
    assert "by the largest one seen" in profile.notes[0]


def test_a_dense_layer_of_zeros_is_left_out(tmp_path):
    whole = np.concatenate([np.zeros((40, 2, 2), np.uint8), choices()], axis=1)
    (tmp_path / "e").write_bytes(packed(whole))
    profile = read_profile([tmp_path / "e"], READING)
    same_load(profile, choices())
    assert (profile.layers, profile.num_model_layers) == ((2, 3, 4), 5)


@pytest.mark.parametrize("form", ["lines", "array", "lists", "prompt apart"])
def test_responses_of_vllm_are_read(tmp_path, form):
    parts = [choices(12, seed) for seed in range(4)]
    encode = np.ndarray.tolist if form == "lists" else text
    responses = [
        {"model": "m", "choices": [{"index": 0, "routed_experts": encode(a)}, {"routed_experts": encode(b)}]}
        for a, b in (parts[:2], parts[2:])
    ]
    if form == "prompt apart":  # vLLM 0.21
        for response, part in zip(responses, parts[::2], strict=True):
            response["prompt_routed_experts"] = encode(part)
            del response["choices"][0]
    lines = json.dumps(responses) if form == "array" else "\n".join(map(json.dumps, responses))
    (tmp_path / "r.jsonl").write_text(lines)
    profile = read_profile([tmp_path / "r.jsonl"], READING)
    same_load(profile, np.concatenate(parts))
    assert profile.model == "m"
    assert "vLLM's responses (2)" in profile.origin


@pytest.mark.parametrize("form", ["npy", "json"])
def test_counts_without_steps_say_what_was_assumed(tmp_path, form):
    counts = np.arange(12).reshape(2, 6) * 100
    data = packed(counts) if form == "npy" else json.dumps({"logical_count": counts.tolist()}).encode()
    (tmp_path / "c").write_bytes(data)
    profile = read_profile([tmp_path / "c"], ProfileReading(tokens_per_step=8, top_k=2))
    share = counts / counts.sum(axis=1, keepdims=True)
    assert profile.load.activated == pytest.approx(1 - (1 - share) ** 16)
    assert not profile.load.variance.any()
    assert "variance is taken as 0" in profile.notes[0]


def test_counts_of_steps_are_read(tmp_path):
    counts = np.random.default_rng(0).integers(0, 9, (5, 2, 6))
    (tmp_path / "c").write_text(json.dumps({"logical_count": counts.tolist()}))
    profile = read_profile([tmp_path / "c"], READING)
    assert profile.load.tokens == pytest.approx(counts.mean(axis=0)[None])
    assert profile.load.variance == pytest.approx(counts.var(axis=0))


def test_a_trace_may_be_read_by_data_set(tmp_path):
    (tmp_path / "e.npy").write_bytes(packed(choices()))
    rows = [("gpqa", 10, 0), ("mmlu", 30, 10)]
    (tmp_path / "i.jsonl").write_text(
        "".join(
            json.dumps({"dataset": name, "category": "x", "num_tokens": n, "offset": at, "prompt_tokens": 1}) + "\n"
            for name, n, at in rows
        )
    )
    reading = ProfileReading(num_experts=6, tokens_per_step=8, index=tmp_path / "i.jsonl", datasets=("mmlu",))
    same_load(read_profile([tmp_path / "e.npy"], reading), choices()[10:])
    unknown = ProfileReading(index=tmp_path / "i.jsonl", datasets=("law",))
    with pytest.raises(ConfigError, match="no data set 'law'; it has gpqa, mmlu"):
        read_profile([tmp_path / "e.npy"], unknown)


def test_a_profile_of_ours_is_read(tmp_path):
    (tmp_path / "e").write_bytes(packed(choices()))
    write_profile(tmp_path / "p", read_profile([tmp_path / "e"], READING))
    same_load(read_profile([tmp_path / "p"], ProfileReading()), choices())
    with pytest.raises(ConfigError, match="6 experts a layer, and 7 were expected"):
        read_profile([tmp_path / "p"], ProfileReading(num_experts=7))


GOOD = {"choices": [{"routed_experts": text(choices())}]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty or cut off"),
        (b"hello", "of no form that Moestro reads"),
        (b"PK\x03\x04 no zip", "damaged or cut off"),
        (packed(choices())[:-5], "cannot be read"),
        (packed(choices().astype(float)), "expected whole numbers"),
        (packed(np.zeros(4, np.uint8)), "expected whole numbers"),
        (packed(np.zeros((0, 3, 2), np.uint8)), "expected whole numbers"),
        (packed(np.full((4, 3, 2), 9, np.uint8)), "expert 9 is not one of 6"),
        (packed(np.full((4, 3, 2), -2)), "expert -2 is not one of 6"),
        (packed(np.zeros((4, 3, 2), np.uint8)), "no layer has choices"),
        (zstandard.compress(packed(choices()))[:-9], "empty or cut off"),
        (b'{"choices": [', "neither JSON nor JSON lines"),
        (b"[1, 2]", "expected JSON objects"),
        (b'{"choices": []}', "no routed_experts: start vLLM with --enable-return-routed-experts"),
        (b'{"choices": [{"routed_experts": "%%%"}]}', "response 1: routed_experts is not base64"),
        (b'{"choices": [{"routed_experts": "aGVsbG8="}]}', "response 1: routed_experts cannot be read"),
        (b'{"choices": [{"routed_experts": [[1, 2], [3]]}]}', "no array of whole numbers"),
        (b'{"choices": [{"routed_experts": [[1, 2]]}]}', r"holds \[1, 2\]: expected \[tokens"),
        (b'{"logical_count": [[1, 2], [3]]}', "logical_count is no array of numbers"),
        (b'{"logical_count": [["x"]]}', "logical_count is no array of numbers"),
        (
            json.dumps(GOOD).encode() + b"\n" + json.dumps({"routed_experts": choices(4, 0, 2).tolist()}).encode(),
            "different layers or top_k",
        ),
    ],
)
def test_files_of_other_forms_are_refused(tmp_path, data, words):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_profile([tmp_path / "x"], READING)


def test_files_of_different_forms_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(packed(choices()))
    (tmp_path / "b").write_text(json.dumps(GOOD))
    with pytest.raises(ConfigError, match="different forms: array, json"):
        read_profile([tmp_path / "a", tmp_path / "b"], READING)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile([tmp_path / "missing"], READING)


def test_responses_without_routed_experts_are_not_counted_as_having_some(tmp_path):
    lines = [GOOD, {"choices": [{"routed_experts": None}]}, GOOD]
    (tmp_path / "r").write_text("\n".join(map(json.dumps, lines)))
    profile = read_profile([tmp_path / "r"], READING)
    assert "vLLM's responses (2)" in profile.origin
    assert "responses without routed_experts, which are left out: 1" in profile.notes


def test_a_setting_without_effect_is_refused(tmp_path):
    write_profile(tmp_path / "p", read_profile_of(tmp_path))
    (tmp_path / "steps").write_text(json.dumps({"logical_count": np.ones((2, 3, 6)).tolist()}))
    for name in ("p", "steps"):
        with pytest.raises(ConfigError, match="steps of its own: leave out --tokens-per-step"):
            read_profile([tmp_path / name], replace(READING, needs_steps=True))
    read_profile([tmp_path / "choices"], replace(READING, needs_steps=True))
    with pytest.raises(ConfigError, match="--dataset chooses among the answers of --routing-index"):
        read_profile([tmp_path / "choices"], replace(READING, datasets=("mmlu",)))
    with pytest.raises(ConfigError, match="--routing-index goes with choices of experts"):
        read_profile([tmp_path / "steps"], replace(READING, index=tmp_path / "i"))


def read_profile_of(tmp_path):
    (tmp_path / "choices").write_bytes(packed(choices()))
    return read_profile([tmp_path / "choices"], READING)


def test_a_named_network_tells_the_number_of_experts(tmp_path):
    (tmp_path / "r").write_text(json.dumps(GOOD | {"model": "Owner/Network"}))
    queries = []
    reading = ProfileReading(experts_of=lambda *found: queries.append(found) or 9)
    assert read_profile([tmp_path / "r"], reading).num_experts == 9
    assert queries == [("Owner/Network", 3)]
