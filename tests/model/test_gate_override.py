"""Overridden gates: keyed, distinct, distributed as named, and refused where they cannot fit."""

from __future__ import annotations

import numpy as np
import pytest
from parity import drive, tiny

from moestro.errors import ConfigError
from moestro.model.experts.gate_override import ExponentialGate, GateShape, check_spec, make_override

SHAPE = GateShape(layers=(1, 2, 5), num_experts=8, num_chosen=3)


def tokens(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(4096, size=num), rng.integers(50_000, size=num).astype(np.int32)


def trace_of(path, rows: np.ndarray) -> str:
    np.save(path / "trace.npy", rows)
    return f"trace:{path / 'trace.npy'}"


def named_trace_of(path, rows: np.ndarray, token_ids: np.ndarray) -> str:
    np.savez(path / "trace.npz", experts=rows, token_ids=token_ids)
    return f"trace:{path / 'trace.npz'}"


@pytest.fixture
def recorded(tmp_path):
    rng = np.random.default_rng(5)
    rows = np.stack([np.stack([rng.permutation(8)[:3] for _ in SHAPE.layers]) for _ in range(50)]).astype(np.uint8)
    return rows, trace_of(tmp_path, rows)


RECORDED_IDS = np.arange(50) * 1000 % 7000  # seven tokens, in no order


@pytest.fixture(params=["uniform", "exponential:0.5", "exponential:40", "trace", "trace of tokens"])
def spec(request, recorded, tmp_path):
    rows, trace = recorded
    if request.param == "trace of tokens":
        return named_trace_of(tmp_path, rows, RECORDED_IDS)
    return trace if request.param == "trace" else request.param


def test_a_choice_depends_on_the_token_alone_and_never_on_the_batch(spec):
    positions, token_ids = tokens(64)
    whole = make_override(spec, SHAPE, 7).choose(positions, token_ids)
    order = np.random.default_rng(1).permutation(64)
    parts = [make_override(spec, SHAPE, 7).choose(positions[at], token_ids[at]) for at in np.split(order, [3, 4, 40])]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[:, order])


def test_a_choice_names_distinct_experts_of_the_network(spec):
    chosen = make_override(spec, SHAPE, 7).choose(*tokens(500))
    assert chosen.shape == (3, 500, 3)
    assert chosen.dtype == np.int64
    assert chosen.min() >= 0
    assert chosen.max() < 8
    assert (np.diff(np.sort(chosen, axis=2), axis=2) > 0).all()


@pytest.mark.parametrize("spec", ["uniform", "exponential:0.5"])
def test_another_seed_layer_position_or_token_is_another_draw(spec):
    positions, token_ids = tokens(200)
    chosen = make_override(spec, SHAPE, 7).choose(positions, token_ids)
    others = [
        make_override(spec, SHAPE, 8).choose(positions, token_ids)[0],
        make_override(spec, SHAPE, 7).choose(positions + 1, token_ids)[0],
        make_override(spec, SHAPE, 7).choose(positions, token_ids + 1)[0],
        chosen[1],
    ]
    for other in others:
        assert (chosen[0] != other).any(axis=1).mean() > 0.5


def test_uniform_visits_every_expert_equally_often():
    counts = np.bincount(make_override("uniform", SHAPE, 0).choose(*tokens(40_000)).ravel(), minlength=8)
    np.testing.assert_allclose(counts / counts.sum(), 1 / 8, atol=0.004)


def test_exponential_draws_the_first_expert_with_weights_that_fall_with_its_rank():
    gate = ExponentialGate(0.7, SHAPE, 3)
    chosen = gate.choose(*tokens(40_000))
    weights = np.exp(-0.7 * np.arange(8))
    for layer in range(3):
        assert sorted(gate.ranks[layer]) == list(range(8))
        by_rank = np.bincount(gate.ranks[layer][chosen[layer, :, 0]], minlength=8)
        np.testing.assert_allclose(by_rank / by_rank.sum(), weights / weights.sum(), atol=0.008)


def test_exponential_draws_the_second_expert_without_the_first():
    gate = ExponentialGate(0.7, SHAPE, 3)
    ranks = gate.ranks[0][gate.choose(*tokens(40_000))[0]]
    second = np.bincount(ranks[ranks[:, 0] == 0, 1], minlength=8)
    weights = np.exp(-0.7 * np.arange(8)) * (np.arange(8) > 0)
    np.testing.assert_allclose(second / second.sum(), weights / weights.sum(), atol=0.012)


def test_hot_experts_differ_from_layer_to_layer():
    ranks = ExponentialGate(1.0, GateShape(layers=tuple(range(12)), num_experts=16, num_chosen=2), 0).ranks
    assert len(set(ranks.argmin(axis=1).tolist())) > 5


def test_a_trace_gives_whole_recorded_rows_and_all_of_them(recorded):
    rows, spec = recorded
    chosen = make_override(spec, SHAPE, 0).choose(*tokens(2_000)).transpose(1, 0, 2)
    seen = {row.astype(np.uint8).tobytes() for row in chosen}
    assert seen == {row.tobytes() for row in rows}


def test_a_trace_of_tokens_gives_a_token_the_rows_of_its_id_and_an_unknown_one_any(recorded, tmp_path):
    rows, _ = recorded
    override = make_override(named_trace_of(tmp_path, rows, RECORDED_IDS), SHAPE, 0)
    positions = np.arange(2_000)
    for token_id in (1, 0, 3000, 6000, 6500):
        chosen = override.choose(positions, np.full(2_000, token_id, np.int32)).transpose(1, 0, 2)
        own = rows[token_id == RECORDED_IDS] if token_id in RECORDED_IDS else rows
        assert {row.astype(np.uint8).tobytes() for row in chosen} == {row.tobytes() for row in own}


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"token_ids": np.zeros(50, np.int32)}, "cannot be read"),
        ({"experts": np.zeros((50, 3, 3), np.uint8)}, "cannot be read"),
        ({"experts": "recorded", "token_ids": np.zeros(49, np.int32)}, "an integer for each of the 50 rows"),
        ({"experts": "recorded", "token_ids": np.zeros(50)}, "an integer for each of the 50 rows"),
    ],
)
def test_a_trace_of_tokens_that_lacks_something_is_refused(arrays, reason, recorded, tmp_path):
    given = {name: recorded[0] if isinstance(array, str) else array for name, array in arrays.items()}
    np.savez(tmp_path / "trace.npz", **given)
    with pytest.raises(ConfigError, match=reason):
        make_override(f"trace:{tmp_path / 'trace.npz'}", SHAPE, 0)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (np.zeros((4, 2, 3), np.uint8), "3 layers with experts"),
        (np.zeros((4, 3, 2), np.uint8), "3 experts a token"),
        (np.zeros((0, 3, 3), np.uint8), "tokens >= 1"),
        (np.zeros((4, 3, 3), np.float32), "needs integers"),
        (np.full((4, 3, 3), 8, np.uint8), "has 0 .. 7"),
        (np.full((4, 3, 3), -1, np.int8), "has 0 .. 7"),
        (np.zeros((4, 3, 3), np.uint8), "one expert twice"),
    ],
)
def test_a_trace_that_does_not_fit_the_network_is_refused(rows, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        make_override(trace_of(tmp_path, rows), SHAPE, 0)


def test_a_trace_that_is_missing_or_no_array_is_refused(tmp_path):
    for name in ("torn.npy", "torn.npz"):
        (tmp_path / name).write_bytes(b"not an array")
    for name in ("gone.npy", "torn.npy", "torn.npz"):
        with pytest.raises(ConfigError, match="cannot be read"):
            make_override(f"trace:{tmp_path / name}", SHAPE, 0)


@pytest.mark.parametrize(
    "spec", ["", "hot", "uniform:1", "exponential", "exponential:-1", "exponential:inf", "exponential:x", "trace:"]
)
def test_a_malformed_override_is_refused_with_what_is_allowed(spec):
    with pytest.raises(ConfigError, match="exponential:LAMBDA"):
        check_spec(spec)


def test_a_packed_trace_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="zstd -d"):
        check_spec("trace:experts.npy.zst")


def test_a_dense_model_has_no_gate_to_override():
    with pytest.raises(ConfigError, match="no experts"):
        make_override("uniform", GateShape(layers=(), num_experts=0, num_chosen=0), 0)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_under_an_override_no_schedule_changes_a_token_or_the_experts_visited(name, checkpoint):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, tiny.VOCAB, size=size).tolist() for size in (9, 14, 3)]
    outcomes = []
    for seed in (1, 2):
        network = drive.recording(tiny.load(checkpoint(name)))
        num_chosen = network.probe(4)[1]
        network.override = make_override("exponential:0.3", network.gate_shape(num_chosen), 11)
        device = drive.make_device(network)
        sequences = drive.drive(device, prompts, 6, np.random.default_rng(seed))
        outcomes.append(([s.tokens for s in sequences], network.total_counts.tolist()))
        plain = drive.recording(tiny.load(checkpoint(name)))
        free = drive.drive(drive.make_device(plain), prompts, 6, np.random.default_rng(seed))
        assert [s.tokens for s in free] != outcomes[-1][0]
    assert outcomes[0] == outcomes[1]
