"""What cannot be served is refused at load, with the reason and before weights are read."""

from __future__ import annotations

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
from parity import drive, tiny
from torch import nn

from moestro.errors import UnsupportedModelError
from moestro.model import check, refuse
from moestro.model.attention import Scoring
from moestro.model.device import open_device
from moestro.model.load import read_config


@pytest.fixture
def directory(checkpoint, tmp_path):
    """A copy of a good checkpoint, to spoil."""
    return shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "copy")


def refusal(directory, **changes) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(tiny.settings_of(directory, **changes))
    return str(caught.value)


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def only_config(tmp_path, name: str, **changes):
    """A checkpoint without weights: what is refused here is refused before they are read."""
    tiny.make_config(name, **changes).save_pretrained(tmp_path)
    return tmp_path


def test_a_missing_directory(tmp_path):
    assert "is no directory" in refusal(tmp_path / "gone")


def test_an_empty_directory(tmp_path):
    assert refusal(tmp_path).endswith("holds no config.json: it is empty.")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("model-Q4_K_M.gguf", "GGUF files are not read"),
        ("adapter_config.json", "LoRA adapter"),
        ("notes.txt", "give a checkpoint directory"),
    ],
)
def test_a_directory_of_something_else(file, reason, tmp_path):
    (tmp_path / file).touch()
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_malformed_config(text, directory):
    (directory / "config.json").write_text(text)
    assert "is malformed" in refusal(directory)


def test_a_config_without_a_family(directory):
    edit(directory, model_type=None)
    assert "names no model_type" in refusal(directory)


def test_an_unknown_family(directory):
    assert "model_type 'qwen99' is unknown" in refusal(edit(directory, model_type="qwen99"))


def test_a_family_that_needs_its_own_code(directory):
    edit(directory, model_type="qwen99", auto_map={"AutoModelForCausalLM": "modeling.Qwen99"})
    assert "trust_remote_code" in refusal(directory)


def test_a_known_family_with_code_of_its_own_runs_on_transformers_network(directory):
    edit(directory, auto_map={"AutoModelForCausalLM": "modeling.Mine", "AutoConfig": "configuration.Mine"})
    assert read_config(tiny.settings_of(directory)).model_type == "qwen3_moe"


def test_an_encoder_decoder(directory):
    assert "encoder-decoder" in refusal(edit(directory, model_type="t5", is_encoder_decoder=True))


@pytest.mark.parametrize("family", ["t5", "clip", "vit"])
def test_a_family_that_cannot_generate_text(family, directory):
    assert "no causal language model" in refusal(edit(directory, model_type=family))


def test_a_head_that_cannot_generate_text(directory):
    assert "cannot generate text" in refusal(edit(directory, architectures=["Qwen3MoeForSequenceClassification"]))


def test_a_config_that_transformers_does_not_accept(directory):
    assert "not understood by transformers" in refusal(edit(directory, hidden_size="wide"))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "torchao", "nvfp4", None])
def test_a_weight_format_that_is_not_read(method, directory):
    message = refusal(edit(directory, quantization_config={"quant_method": method}))
    assert f"quantized by {method!r}" in message
    assert "Give an unquantized checkpoint" in message


def test_fp8_without_accelerate(directory, monkeypatch):
    monkeypatch.setattr(refuse, "find_spec", lambda name: None)
    assert "accelerate" in refusal(edit(directory, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize("ending", [".bin", ".pt", ".pth"])
def test_pickled_weights(ending, directory):
    (directory / "model.safetensors").rename(directory / f"pytorch_model{ending}")
    message = refusal(directory)
    assert "holds no .safetensors weights" in message
    assert "convert them to safetensors" in message


def test_no_weights_at_all(tmp_path):
    assert "holds no .safetensors weights" in refusal(only_config(tmp_path, "qwen3_moe"))


def test_a_lost_shard(directory):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 weight files, first model-00002-of-00002.safetensors" in refusal(directory)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_malformed_index(text, directory):
    (directory / "model.safetensors.index.json").write_text(text)
    assert "is malformed" in refusal(directory)


def test_a_malformed_generation_config(directory):
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"generation_config.json is malformed"):
        open_device(tiny.settings_of(directory))


@pytest.mark.parametrize(
    "family", ["mamba", "jamba", "qwen3_next", "minimax", "falcon_h1", "llama4_text", "deepseek_v32"]
)
def test_state_that_is_not_kv(family, tmp_path):
    message = refusal(only_config(tmp_path, family), load_format="dummy")
    assert "only full and sliding attention keep their state in KV blocks" in message


def test_a_convolution_between_tokens(tmp_path):
    directory = only_config(tmp_path, "lfm2", layer_types=["full_attention", "conv", "full_attention"])
    assert "layers of type conv" in refusal(directory, load_format="dummy")
    skeleton = nn.Sequential(nn.Conv1d(2, 2, 3))
    skeleton._supports_attention_backend = True
    with pytest.raises(UnsupportedModelError, match=r"mixes tokens by a convolution \(0\)"):
        refuse.refuse_skeleton(skeleton)


def test_softcapped_scores(tmp_path):
    assert "softcaps" in refusal(only_config(tmp_path, "gemma2", intermediate_size=48), load_format="dummy")


def test_attention_in_both_directions(tmp_path):
    directory = only_config(tmp_path, "bert", intermediate_size=48)
    assert "attends to later tokens too" in refusal(directory, load_format="dummy")


@pytest.mark.parametrize("family", ["gptj", "bloom", "stablelm"])
def test_attention_outside_the_interface(family, tmp_path):
    directory = only_config(tmp_path, family, rotary_dim=4)
    assert "attention interface" in refusal(directory, load_format="dummy")


def test_a_network_that_takes_pictures(directory, monkeypatch):
    config = read_config(tiny.settings_of(directory))
    config.vision_config = {}
    with pytest.raises(UnsupportedModelError, match="more than text"):
        refuse.refuse_config(config, 16)


def rope(**parameters) -> dict:
    return {"rope_parameters": {"rope_theta": 10000.0, "factor": 4.0, **parameters}}


def test_frequencies_that_follow_the_longest_of_the_batch(tmp_path):
    directory = only_config(tmp_path, "llama", intermediate_size=48, **rope(rope_type="dynamic"))
    assert "rope_type 'dynamic'" in refusal(directory, load_format="dummy")


class TestLongrope:
    """Its frequencies switch for the whole batch once any sequence passes the original length (24 here)."""

    PHI3: ClassVar = {
        "intermediate_size": 48,
        "original_max_position_embeddings": 24,
        "rope_parameters": tiny.LONG_ROPE,
    }

    def test_is_refused_where_a_sequence_may_pass_the_original_length(self, tmp_path):
        directory = only_config(tmp_path, "phi3", **self.PHI3)
        message = refusal(directory, load_format="dummy")
        assert "set --max-model-len 24 or less (it is 256)" in message
        assert "24 or less (it is 25)" in refusal(directory, load_format="dummy", max_model_len=25)

    def test_is_served_up_to_the_original_length(self, tmp_path):
        directory = only_config(tmp_path, "phi3", **self.PHI3)
        assert open_device(tiny.settings_of(directory, load_format="dummy", max_model_len=24))[1].max_model_len == 24

    def test_of_phimoe_is_refused_only_where_its_factors_differ(self, tmp_path):
        directory = only_config(tmp_path, "phimoe", rope_parameters={**tiny.LONG_ROPE, "long_mscale": 1.5})
        assert "'longrope'" in refusal(directory, load_format="dummy")
        assert read_config(tiny.settings_of(directory, load_format="dummy", max_model_len=24))

    def test_of_phimoe_with_other_factors_would_indeed_be_served_wrong(self, tmp_path):
        config = tiny.make_config("phimoe", rope_parameters={**tiny.LONG_ROPE, "long_mscale": 1.5})
        directory = tiny.save_checkpoint(tmp_path, config)
        differences = []
        for longest in (17, 29):
            network = drive.recording(tiny.load(directory, max_model_len=24))
            rng = np.random.default_rng(0)
            prompts = [rng.integers(3, tiny.VOCAB, size=size).tolist() for size in (longest, 5)]
            sequences = drive.drive(drive.make_device(network), prompts, 4, rng)
            differences.append(drive.compare(sequences, tiny.load_oracle(directory)).largest)
        assert differences[0] < 2e-5
        assert differences[1] > 1e-2


class TestUntestedFamily:
    """A family without a parity test of its own must pass a comparison with transformers when it is loaded."""

    def test_is_served_if_it_passes(self, tmp_path):
        directory = tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3", intermediate_size=48))
        info = open_device(tiny.settings_of(directory))[1]
        assert "'qwen3' is not a tested family; it passed" in info.notes[0]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    def test_is_served_in_any_dtype(self, dtype, tmp_path, monkeypatch):
        monkeypatch.setattr(check, "TESTED_FAMILIES", frozenset())
        for name in ("qwen3_moe", "gpt_oss", "mixtral-window"):
            directory = tiny.save_checkpoint(tmp_path / name, tiny.make_config(name))
            assert open_device(tiny.settings_of(directory, dtype=dtype))[1].dtype == dtype

    def test_is_refused_if_its_attention_is_another(self, tmp_path):
        directory = tiny.save_checkpoint(tmp_path, tiny.make_config("diffllama", intermediate_size=48))
        with pytest.raises(UnsupportedModelError, match="differ from transformers' own pass"):
            open_device(tiny.settings_of(directory))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_is_refused_if_its_window_is_lost(self, dtype, checkpoint, monkeypatch):
        monkeypatch.setattr(check, "TESTED_FAMILIES", frozenset())
        monkeypatch.setattr("moestro.model.attention.Scoring", _without_window)
        with pytest.raises(UnsupportedModelError, match="does not tell its attention of it"):
            open_device(tiny.settings_of(checkpoint("mixtral-window"), dtype=dtype))
        monkeypatch.setattr(check, "_refuse_unseen_window", lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="differ from transformers' own pass"):
            open_device(tiny.settings_of(checkpoint("mixtral-window"), dtype=dtype))

    def test_is_refused_if_it_masks_by_itself(self, tmp_path):
        directory = only_config(tmp_path, "doge", intermediate_size=48)
        with pytest.raises(UnsupportedModelError, match="a mask of its own"):
            open_device(tiny.settings_of(directory, load_format="dummy"))

    def test_is_refused_if_it_keeps_arguments_to_itself(self, tmp_path):
        directory = only_config(tmp_path, "nemotron", intermediate_size=48)
        with pytest.raises(UnsupportedModelError, match="does not hand its keyword arguments on"):
            open_device(tiny.settings_of(directory, load_format="dummy"))

    def test_is_refused_if_it_fails(self, checkpoint, monkeypatch):
        def fail(*args):
            raise RuntimeError("shapes cannot be multiplied")

        monkeypatch.setattr(check.Network, "logits", fail)
        with pytest.raises(UnsupportedModelError, match="cannot run a paged step: RuntimeError"):
            open_device(tiny.settings_of(checkpoint("qwen2")))


def _without_window(scaling, window, sinks):
    return Scoring(scaling, None, sinks)
