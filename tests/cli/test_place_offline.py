"""Gimbal's offline profile: the demo model on random tokens, against profiles of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from moestro.calibrate import shapes
from moestro.calibrate.shapes import RandomInput
from moestro.cli import main
from moestro.cli.placing.offline import compare_offline, offline_load
from moestro.core.experts.expert_load import ExpertLoad
from moestro.errors import ConfigError
from moestro.workload.experts.expert_profile import ExpertProfile, write_profile

TEXT = RandomInput(num_steps=6)
TOP_K, NUM_LAYERS, NUM_EXPERTS = 2, 7, 16


@pytest.fixture(scope="module")
def load(demo_dir: Path) -> ExpertLoad:
    return offline_load(str(demo_dir), TEXT)


def profile_of(load: ExpertLoad) -> ExpertProfile:
    return ExpertProfile(load=load, layers=tuple(range(load.tokens.shape[1])), num_model_layers=load.tokens.shape[1])


def test_random_tokens_are_counted_as_those_of_requests(load):
    num_tokens = TEXT.num_sequences * TEXT.num_tokens
    assert load.tokens.shape == (1, NUM_LAYERS, NUM_EXPERTS)
    np.testing.assert_allclose(load.total.sum(axis=1), TOP_K * num_tokens)
    assert load.num_steps == TEXT.num_steps
    np.testing.assert_allclose(load.pairs.count.sum(), (NUM_LAYERS - 1) * TOP_K**2 * num_tokens, rtol=0.3)
    assert set(load.pairs.layer.tolist()) == set(range(NUM_LAYERS - 1))


def test_another_seed_shows_nearly_the_same_pairs_and_more_than_loads_explain(load, demo_dir):
    other = offline_load(str(demo_dir), dataclasses.replace(TEXT, seed=1))
    found = compare_offline(profile_of(load), other)
    assert found.offline.mean > 0.6 > 2 * found.offline.by_chance
    assert found.independent.mean < found.offline.mean
    assert "by chance 6.2%" in str(found)


def test_profiles_that_cannot_be_compared_are_refused(load):
    without = dataclasses.replace(load, pairs=None)
    with pytest.raises(ConfigError, match="profile has none"):
        compare_offline(profile_of(without), load)
    fewer = ExpertLoad(load.tokens[:, :3], load.variance[:3], load.activated[:3], 1.0)
    with pytest.raises(ConfigError, match="3 layers of 16 experts, and the model of --offline 7 layers"):
        compare_offline(profile_of(fewer), load)


def test_the_command_prints_the_overlap(load, tmp_path, demo_dir, capsys, monkeypatch):
    monkeypatch.setattr(shapes, "RandomInput", lambda: TEXT)
    path = tmp_path / "online.npz"
    write_profile(path, profile_of(load))
    with pytest.raises(SystemExit) as ended:
        main(["place", str(path), "--devices", "4", "--policy", "static", "--offline", str(demo_dir)])
    assert ended.value.code == 0
    assert "of the 16 most frequent ones of a layer, 100% are those" in capsys.readouterr().out
