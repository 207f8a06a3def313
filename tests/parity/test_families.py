"""Every tested family: paged, chunked, mixed steps give transformers' own logits and greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from moestro.model.attention import PLAIN, paged_attention
from moestro.model.experts.routed import routed_experts

pytestmark = pytest.mark.transformers

NUM_NEW = 6
WINDOWED = {"mixtral-window", "qwen2-window", "qwen3_moe-window", "gpt_oss"}


def prompts(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(3, tiny.VOCAB, size=size).tolist() for size in (17, 30, 5, 11)]


def difference(network, oracle, name: str = "", seed: int = 0) -> drive.Difference:
    rng = np.random.default_rng(seed)
    sequences = drive.drive(drive.make_device(drive.recording(network)), prompts(rng), NUM_NEW, rng)
    return drive.compare(sequences, oracle, name)


@pytest.fixture(scope="session")
def oracles(checkpoint):
    return lambda name: tiny.load_oracle(checkpoint(name))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_family_gets_the_logits_and_greedy_tokens_of_transformers(name, seed, checkpoint, oracles):
    found = difference(tiny.load(checkpoint(name)), oracles(name), name, seed)
    print(f"{name}: largest difference {found.largest:.1e} over {found.num_rows} rows")
    assert found.num_rows > 40
    assert found.wrong_tokens == 0
    assert found.largest < 2e-5


@pytest.mark.parametrize("name", ["qwen2_moe", "phimoe"])
def test_a_window_that_transformers_gives_to_its_mask_alone_counts(name, tmp_path):
    windowed = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config(name, **windowed))
    network, oracle = tiny.load(directory), tiny.load_oracle(directory)
    found = difference(network, oracle, name)
    assert found.wrong_tokens == 0
    assert found.largest < 2e-5
    network.model.config.sliding_window = None
    for module in network.model.modules():
        module.__dict__.pop("sliding_window", None)
    assert difference(network, oracle).largest > 1e-2


@pytest.mark.parametrize("name", ["mixtral-window", "gpt_oss", "deepseek_v2"])
def test_the_plain_twin_of_attention_gets_them_too(name, checkpoint, oracles):
    network = tiny.load(checkpoint(name))
    network.model.set_attn_implementation(PLAIN)
    assert difference(network, oracles(name), name, seed=1).largest < 2e-5


def _without(*names):
    return lambda *args, **kwargs: paged_attention(*args, **{**kwargs, **dict.fromkeys(names)})


def _shifted(module, hidden, index, weights):
    return routed_experts(module, hidden, (index + 1) % module.num_experts, weights)


def _break(network, how: str):
    if how == "positions off by one":
        network = drive.recording(network)
        network.position_error = 1
        return network
    if how == "experts shifted by one":
        ExpertsInterface.register("broken", _shifted)
        network.model.set_experts_implementation("broken")
    else:
        AttentionInterface.register("broken", _without("s_aux" if how == "no sink" else "sliding_window"))
        network.model.set_attn_implementation("broken")
    return network


BREAKS = (
    [(name, "positions off by one") for name in tiny.FAMILIES]
    + [(name, "experts shifted by one") for name in tiny.SPARSE]
    + [(name, "no window") for name in sorted(WINDOWED)]
    + [("gpt_oss", "no sink")]
)


@pytest.mark.parametrize(("name", "how"), BREAKS)
def test_the_comparison_detects_what_is_broken(name, how, checkpoint, oracles, monkeypatch):
    network = _break(tiny.load(checkpoint(name)), how)
    if isinstance(network, drive.RecordingNetwork):
        monkeypatch.setattr(drive, "recording", lambda same: same)
    assert difference(network, oracles(name)).largest > 1e-2


@pytest.mark.parametrize(
    ("name", "attention", "bound"),
    [
        ("qwen3_moe", "sdpa", 1e-12),
        ("mixtral", "sdpa", 1e-12),
        ("mixtral-window", "sdpa", 1e-12),
        ("gpt_oss", "eager", 1e-12),
        # DeepSeek's gates compute in float32; `model/test_latent.py` compares its attention alone.
        ("deepseek_v2", "sdpa", 2e-6),
        ("deepseek_v2-lite", "sdpa", 2e-6),
        ("deepseek_v3", "sdpa", 2e-6),
    ],
)
def test_in_float64_the_logits_agree_to_the_last_digits(name, attention, bound, checkpoint):
    network = tiny.load(checkpoint(name), dtype="float64")
    oracle = tiny.load_oracle(checkpoint(name), torch.float64, attention)
    found = difference(network, oracle, name, seed=2)
    print(f"{name}: largest difference in float64 {found.largest:.1e}")
    assert found.wrong_tokens == 0
    assert found.largest < bound


def test_prompt_logprobs_are_those_of_the_oracle(checkpoint, oracles):
    rng = np.random.default_rng(3)
    network = drive.recording(tiny.load(checkpoint("qwen3_moe")))
    sequences = drive.drive(drive.make_device(network), prompts(rng), NUM_NEW, rng)
    with torch.inference_mode():
        for sequence in sequences:
            theirs = oracles("qwen3_moe")(input_ids=torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
            known = {at: entry for at, entry in sequence.prompt_logprobs.items() if at + 1 < sequence.num_prompt}
            assert known
            for at, entry in known.items():
                assert entry.token_id == sequence.tokens[at + 1]
                assert entry.logprob == pytest.approx(float(theirs[at, entry.token_id]), abs=2e-5)
                assert entry.rank == 1 + int((theirs[at] > theirs[at, entry.token_id]).sum())
