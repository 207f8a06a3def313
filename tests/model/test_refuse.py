"""What cannot be served is refused at load, with the reason and before weights are read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from parity import drive, tiny
from safetensors.torch import load_file, save_file
from support.lying_checkpoints import NASTY
from support.quantized_checkpoints import fp8_twins
from torch import nn

from moestro.errors import ConfigError, UnsupportedModelError
from moestro.files import checkpoint as checkpoint_module
from moestro.model import check
from moestro.model.attention import Scoring
from moestro.model.device import open_device
from moestro.model.load import read_config
from moestro.model.staged.staged_device import open_staged_device

pytestmark = pytest.mark.transformers


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
        ("model-Q4_K_M.gguf", "GGUF files are not supported"),
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
    assert "transformers does not accept config.json" in refusal(edit(directory, rope_parameters={"rope_type": 3}))


def test_a_size_of_a_wrong_kind(directory):
    assert "hidden_size must be a whole number from 1 to 1048576, got 'wide'" in refusal(
        edit(directory, hidden_size="wide")
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "torchao", "nvfp4", None])
def test_a_weight_format_that_is_not_read(method, directory):
    message = refusal(edit(directory, quantization_config={"quant_method": method}))
    assert f"quantized by {method!r}" in message
    assert "Give an unquantized checkpoint" in message


def test_fp8_without_accelerate(directory, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
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


@pytest.mark.parametrize(
    "name", ["evil.bin", "../model.safetensors", "/tmp/model.safetensors", "deep/x.safetensors", ""]
)
def test_an_index_that_names_what_is_not_read(name, directory):
    (directory / "evil.bin").touch()
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    message = refusal(directory)
    assert f"names the weight file {name!r}: only .safetensors files beside it are read" in message
    assert "Convert the weights to safetensors" in message


@pytest.mark.parametrize("name", ["evil.bin", "model.safetensors", "elsewhere.safetensors.index.json"])
def test_a_config_that_names_the_weights_itself(name, directory):
    assert "transformers_weights" in refusal(edit(directory, transformers_weights=name))


def test_pickled_weights_beside_safetensors_are_not_looked_at(directory):
    (directory / "pytorch_model.bin").write_bytes(b"no pickle")
    assert open_device(tiny.settings_of(directory))


def test_an_adapter_beside_the_weights(directory):
    (directory / "adapter_config.json").write_text("{}")
    assert "holds a LoRA adapter" in refusal(directory)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "chat_template.jinja", "merges.txt"]
)
def test_a_link_out_of_the_directory(name, directory, tmp_path):
    (directory / name).touch()
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    assert f"{directory / name} is a link to {tmp_path / name}, outside of the checkpoint's directory" in refusal(
        directory
    )


def test_chat_templates_in_a_folder_that_is_a_link_out_of_the_directory(directory, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "tool_use.jinja").touch()
    (directory / "additional_chat_templates").symlink_to(tmp_path / "templates")
    assert "outside of the checkpoint's directory" in refusal(directory)


def test_links_inside_the_directory_and_files_that_are_not_read_may_stay(directory, tmp_path):
    (directory / "model.safetensors").rename(directory / "weights")
    (directory / "model.safetensors").symlink_to("weights")
    (directory / "README.md").symlink_to(tmp_path / "README.md")
    linked = tmp_path / "linked"
    linked.symlink_to(directory)
    assert open_device(tiny.settings_of(linked))


def test_the_hubs_cache_in_which_all_files_are_links_to_its_blobs(directory, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in directory.iterdir():
        path.rename(blobs / f"sha-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/sha-{path.name}")
    assert open_device(tiny.settings_of(snapshot))
    (tmp_path / "other").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to(tmp_path / "other")
    assert "outside of the checkpoint's directory" in refusal(snapshot)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")]
)
def test_weights_that_are_not_plain_numbers(dtype, name, directory):
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    message = refusal(directory)
    assert f"tensor model.norm.weight is of dtype {name}; F64, F32, F16, BF16 are read" in message


@pytest.mark.parametrize("other", [None, "_scale"])
def test_fp8_weights_without_scales_or_with_scales_of_another_name(other, tmp_path):
    directory = fp8_twins(tmp_path)[0]
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    scales = tensors.pop(f"{name}_scale_inv")
    if other is not None:
        tensors[name + other] = scales
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert f"tensor {name} is of dtype F8_E4M3 and lacks its scales, {name}_scale_inv" in refusal(directory)


@pytest.mark.parametrize(
    ("family", "name", "named"),
    [
        ("ernie4_5_moe", "model.layers.1.input_layernorm.weight", True),  # a gate's bias has another name there
        ("llama", "model.layers.1.self_attn.q_proj.bias", True),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w1.weight", False),
    ],
)
def test_a_layer_that_lacks_a_tensor(family, name, named, checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint(family), tmp_path / "copy")
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    message = refusal(directory)
    assert "parameters in layer 1" in message
    assert ("they lack" in message, f"(they lack {name})" in message) == (named, named)


def test_masks_that_the_network_does_not_read_may_be_of_any_dtype(tmp_path):
    directory = tiny.save_checkpoint(tmp_path, tiny.make_config("gpt_neox", intermediate_size=48))
    tensors = load_file(directory / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(4, 4, dtype=torch.bool)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert open_device(tiny.settings_of(directory))


FILES = ["config.json", "generation_config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": ' * 100_000, "is nested more than 32 levels deep"),
        ('{"a": ' * 100 + "1" + "}" * 100, "is nested more than 32 levels deep"),
        ('{"a": "' + "x" * (4 << 20) + '"}', "at most 4194304 are read"),
        ("[1]", "must hold one JSON object"),
        ("\udcff", "is malformed"),
        ('{"a": ' + "1" * 5000 + "}", "is malformed"),
    ],
    ids=["endless", "deep", "huge", "no object", "no text", "a huge number"],
)
def test_json_without_measure(file, text, reason, directory, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "MAX_INDEX_BYTES", 4 << 20)
    (directory / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnsupportedModelError, match=reason):
        open_device(tiny.settings_of(directory))


def test_a_config_that_is_no_file(directory):
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    assert "is a FIFO, not a regular file" in refusal(directory)


WRONG = [3, 0, -1, "x", "fp8", [[1]], {"a": {"b": 1}}, True, 1e300, float("nan"), 10**12, None]


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_values_of_a_wrong_type_are_refused_and_never_an_error_of_ours(value, directory):
    """Each field of a config, one after the other; a value that happens to be right may load."""
    path = directory / "config.json"
    right = json.loads(path.read_text())
    extra = ("quantization_config", "rope_parameters", "layer_types", "text_config", "vision_config", "rope_scaling")
    for name in {*right, *extra}:
        path.write_text(json.dumps({**right, name: value}))
        with contextlib.suppress(ConfigError):
            read_config(tiny.settings_of(directory))


def test_law_a_config_with_a_lie_is_refused_or_answers(directory):
    """A sample of fields and values, which are loaded: what is not refused computes a first step."""
    rng = random.Random(11)
    path = directory / "config.json"
    right = json.loads(path.read_text())
    refusals = []
    for _ in range(80):
        name, value = rng.choice(sorted(right)), rng.choice([*NASTY, 2, 8, 16, 31, 1e-30])
        path.write_text(json.dumps({**right, name: value}))
        try:
            open_device(tiny.settings_of(directory))
        except ConfigError as error:
            refusals.append(str(error))
    assert 20 < len(refusals) < 80
    assert not any("\n" in text for text in refusals)


@pytest.mark.parametrize("value", ["x", [[1]], 1.5, {"a": 1}, [True], -1, 101], ids=repr)
def test_end_tokens_that_are_no_ids(value, directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UnsupportedModelError, match=r"^generation_config.json: eos_token_id must be an integer from 0"):
        open_device(tiny.settings_of(directory))


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
        check.refuse_skeleton(skeleton)


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
        check.refuse_config(config, 16)


def test_layers_with_a_window_of_no_length(tmp_path):
    directory = only_config(tmp_path, "gpt_oss", **tiny.FAMILIES["gpt_oss"][1])
    edit(directory, sliding_window=None)
    assert "layer_types has sliding_attention, got null" in refusal(directory, load_format="dummy")


def test_a_window_below_zero_that_reaches_the_attention(checkpoint, tmp_path):
    for name in ("mixtral", "llama"):
        edit(shutil.copytree(checkpoint(name), tmp_path / name), sliding_window=-1)
    assert open_device(tiny.settings_of(tmp_path / "llama"))  # which has no windows
    with pytest.raises(UnsupportedModelError, match="sliding_window must be at least 1, or null for none, got -1"):
        open_device(tiny.settings_of(tmp_path / "mixtral"))


def rope(**parameters) -> dict:
    return {"rope_parameters": {"rope_theta": 10000.0, "factor": 4.0, **parameters}}


@pytest.mark.parametrize("changes", [{"hidden_act": "swoosh"}, rope(rope_type="swoosh")])
def test_a_name_that_transformers_does_not_know(changes, tmp_path):
    directory = only_config(tmp_path, "llama", intermediate_size=48)
    edit(directory, **changes)
    assert refusal(directory, load_format="dummy").endswith("network: unknown name or missing field 'swoosh'")


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

    def test_is_refused_too_where_that_length_stands_beside_the_parameters(self, tmp_path):
        factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
        directory = only_config(tmp_path, "llama", intermediate_size=48)
        fields = json.loads((directory / "config.json").read_text())
        del fields["rope_parameters"]
        fields |= {"rope_theta": 10000.0, "rope_scaling": factors, "original_max_position_embeddings": 24}
        (directory / "config.json").write_text(json.dumps(fields))
        assert "set --max-model-len 24 or less" in refusal(directory, load_format="dummy")
        assert read_config(tiny.settings_of(directory, load_format="dummy", max_model_len=24))

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
        with pytest.raises(UnsupportedModelError, match="does not pass it to its attention"):
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
        with pytest.raises(UnsupportedModelError, match="does not pass its keyword arguments on"):
            open_device(tiny.settings_of(directory, load_format="dummy"))

    def test_is_refused_if_it_fails(self, checkpoint, monkeypatch):
        def fail(*args):
            raise RuntimeError("shapes cannot be multiplied")

        monkeypatch.setattr(check.Network, "logits", fail)
        with pytest.raises(UnsupportedModelError, match="cannot run a paged step: RuntimeError"):
            open_device(tiny.settings_of(checkpoint("qwen2")))


def _without_window(scaling, window, sinks):
    return Scoring(scaling, None, sinks)


class TestNonFiniteWeights:
    """The first step of every load looks at its logits, and so NaN or infinity anywhere on their way is refused."""

    PLACES = (
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.2.mlp.gate.weight",
        "lm_head.weight",
    )

    @staticmethod
    def spoil(directory, name: str, value: float):
        tensors = load_file(directory / "model.safetensors")
        tensors[name].view(-1)[0] = value
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("name", PLACES)
    def test_are_refused_by_name(self, name, value, directory):
        self.spoil(directory, name, value)
        with pytest.raises(UnsupportedModelError, match=f"NaN or infinity in {name}, and so do the logits"):
            open_device(tiny.settings_of(directory))

    def test_are_refused_in_stages_too(self, directory):
        self.spoil(directory, "model.norm.weight", torch.nan)
        with pytest.raises(UnsupportedModelError, match=r"NaN or infinity in model\.norm\.weight"):
            open_staged_device(tiny.settings_of(directory), 16)

    def test_numbers_of_the_config_that_make_them_are_refused(self, directory):
        edit(directory, rope_parameters={"rope_type": "default", "rope_theta": 1e-300})
        with pytest.raises(UnsupportedModelError, match="though all weights are finite: check the numbers of config"):
            open_device(tiny.settings_of(directory))
