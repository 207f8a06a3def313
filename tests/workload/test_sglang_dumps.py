"""Dumps of SGLang's recorder.

tools/sglang_dumps.py made the files with SGLang 0.5.23's own code: two ranks, four layers of which the first is dense,
12 experts in 16 slots, six passes of 20 tokens a rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moestro.errors import ConfigError
from moestro.model.tensors import read_tensor_file
from moestro.workload.experts.profile_readers import ProfileReading, read_profile
from moestro.workload.experts.sglang_dumps import SglangDump, profile_of_dumps

DUMPS = Path(__file__).parent / "sglang_dumps"
READING = ProfileReading(read_tensors=read_tensor_file)
FILES = {
    "stat": ["stat.pt"],
    "stat_approx": ["stat_approx.pt"],
    "per_pass": ["per_pass_0.pt", "per_pass_1.pt"],
    "per_token": ["per_token_0.pt", "per_token_1.pt"],
}


def recorded_choices(rank: int, step: int) -> np.ndarray:
    """int[layers, tokens, top_k], what the tool's ranks chose."""
    rng = np.random.default_rng([rank, step])
    found = np.full((4, 20, 2), -1)
    popularity = 1.0 / (1 + np.arange(12)) ** 0.8
    for layer in range(1, 4):
        chances = np.roll(np.random.default_rng(layer).permutation(popularity), 3 * rank)
        for token in range(20):
            found[layer, token] = rng.choice(12, 2, replace=False, p=chances / chances.sum())
    return found


@pytest.fixture(scope="module")
def counts() -> np.ndarray:
    """int[steps, ranks, layers with experts, experts]."""
    found = np.zeros((6, 2, 3, 12), int)
    for step, rank, layer in np.ndindex(6, 2, 3):
        found[step, rank, layer] = np.bincount(recorded_choices(rank, step)[layer + 1].ravel(), minlength=12)
    return found


@pytest.mark.parametrize("mode", FILES)
def test_a_dump_of_each_mode_has_the_load_that_was_recorded(mode, counts):
    profile = read_profile([DUMPS / name for name in FILES[mode]], READING)
    assert (profile.layers, profile.num_model_layers) == ((1, 2, 3), 4)
    by_rank = counts.mean(axis=0)
    assert profile.load.tokens == pytest.approx(by_rank if mode.startswith("per") else by_rank.sum(axis=0)[None])
    assert profile.load.variance == pytest.approx(counts.sum(axis=1).var(axis=0))
    assert profile.load.activated == pytest.approx((counts.sum(axis=1) > 0).mean(axis=0))
    assert profile.load.num_steps == 6
    assert (profile.load.pairs is not None) == (mode == "per_token")


def test_choices_per_token_give_pairs_of_logical_experts():
    pairs = read_profile([DUMPS / name for name in FILES["per_token"]], READING).load.pairs
    wanted = np.zeros((2, 12, 12))
    for rank, step in np.ndindex(2, 6):
        chosen = recorded_choices(rank, step)
        for layer in (1, 2):
            np.add.at(wanted[layer - 1], (chosen[layer, :, :, None], chosen[layer + 1, :, None, :]), 1 / 6)
    found = np.zeros_like(wanted)
    found[pairs.layer, pairs.expert, pairs.next_expert] = pairs.count
    strongest = wanted >= np.sort(wanted, axis=None)[-20]
    assert found[strongest] == pytest.approx(wanted[strongest])


def dump(rank: int, counts: np.ndarray, slots: np.ndarray) -> SglangDump:
    records = [
        {"forward_pass_id": step, "rank": rank, "gatherer_key": "primary", "global_physical_count": count}
        for step, count in enumerate(counts)
    ]
    return SglangDump(Path(f"{rank}.pt"), {"records": records, "last_physical_to_logical_map": slots})


SLOTS = np.tile(np.arange(8), (2, 1))


def test_ranks_that_count_what_they_receive_are_one_source():
    counts = np.random.default_rng(0).integers(1, 9, (3, 2, 8))
    own = np.arange(8) // 4 == np.arange(2)[:, None]
    profile = profile_of_dumps([dump(rank, counts * own[rank], SLOTS) for rank in range(2)], 8)
    assert profile.load.tokens == pytest.approx(counts.mean(axis=0)[None])
    assert "received" in profile.notes[0]


def test_ranks_that_all_see_all_tokens_are_counted_once():
    counts = np.random.default_rng(0).integers(1, 9, (3, 2, 8))
    profile = profile_of_dumps([dump(rank, counts, SLOTS) for rank in range(2)], 8)
    assert profile.load.tokens == pytest.approx(counts.mean(axis=0)[None])
    assert "same tokens" in profile.notes[0]


def test_dumps_of_stat_are_windows_one_after_another(tmp_path, counts):
    # Equal contents are refused as one file that is given twice; the archive names its own file.
    torch.save(torch.load(DUMPS / "stat.pt", weights_only=False), tmp_path / "again.pt")
    profile = read_profile([DUMPS / "stat.pt", tmp_path / "again.pt"], READING)
    assert profile.load.num_steps == 12
    assert profile.load.total == pytest.approx(counts.sum(axis=1).mean(axis=0))


def test_two_dumps_of_one_rank_are_refused():
    counts = np.random.default_rng(0).integers(1, 9, (3, 2, 8))
    one, other = dump(1, counts, SLOTS), dump(1, counts + 1, SLOTS)
    with pytest.raises(ConfigError, match=r"rank 1 is in 1\.pt and in 1\.pt: give one dump a rank"):
        profile_of_dumps([one, other], 8)


def test_dumps_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match="mix dumps"):
        read_profile([DUMPS / "stat.pt", DUMPS / "per_pass_0.pt"], READING)
    with pytest.raises(ConfigError, match="different physical_to_logical_maps"):
        profile_of_dumps([dump(0, np.ones((1, 2, 8)), SLOTS), dump(1, np.ones((1, 2, 8)), SLOTS[:, ::-1])], 8)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logical_count": np.zeros((4, 2, 8), int)}, "no forward pass was recorded"),
        ({"logical_count": np.zeros((2, 8), int)}, "no forward pass was recorded"),
        ({"logical_count": np.zeros(8)}, "must be"),
        ({"logical_count": -np.ones((1, 2, 8))}, "negative"),
        ({"records": [], "last_physical_to_logical_map": SLOTS}, "no forward pass was recorded"),
        ({"records": [{}], "last_physical_to_logical_map": SLOTS}, "not what SGLang's recorder writes"),
        ({"records": [{}]}, "not what SGLang's recorder writes"),
        (
            {
                "records": [{"forward_pass_id": 0, "rank": 0, "global_physical_count": np.zeros((1, 3))}],
                "last_physical_to_logical_map": SLOTS,
            },
            "not what SGLang's recorder writes",
        ),
    ],
)
def test_dumps_without_figures_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        profile_of_dumps([SglangDump(Path("x.pt"), fields)], 8)


def test_damaged_and_foreign_files_of_tensors_are_refused(tmp_path):
    whole = (DUMPS / "stat.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="damaged or cut off"):
        read_profile([tmp_path / "cut.pt"], READING)
    with pytest.raises(ConfigError, match="cannot be read as a file of tensors"):
        read_tensor_file(tmp_path / "cut.pt")
    with pytest.raises(ConfigError, match="torch reads: pip install"):
        read_profile([DUMPS / "stat.pt"], ProfileReading())


def test_a_file_with_code_is_refused_without_the_advice_to_run_it(tmp_path):
    torch.save({"logical_count": Path("x")}, tmp_path / "code.pt")
    with pytest.raises(ConfigError, match="holds other objects than tensors") as refusal:
        read_tensor_file(tmp_path / "code.pt")
    assert "weights_only" not in str(refusal.value)
