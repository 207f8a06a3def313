"""Whatever the files of a checkpoint say, reading them ends in one sentence or in success, within bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.lying_checkpoints import fault_of, make_checkpoint, write_tensors

from moestro.errors import UnsupportedModelError
from moestro.files.checkpoint import read_checkpoint

PROGRAM = Path(__file__).parents[1] / "support" / "lying_checkpoints.py"
MOST_BYTES = 200 << 20  # the program takes 40 MB, and a file that is read 64 MiB


def tell_all_lies(directory: Path, *flags: str) -> dict:
    """The report of all lies, checked in a process with a limit of memory."""
    done = subprocess.run([sys.executable, str(PROGRAM), str(directory), *flags], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


def test_law_a_lie_ends_in_one_sentence_or_is_read(tmp_path):
    report = tell_all_lies(tmp_path)
    assert report["num_lies"] > 1900
    assert report["faults"] == {}
    assert report["peak_bytes"] < MOST_BYTES


def test_the_law_can_fail(tmp_path):
    assert len(tell_all_lies(tmp_path, "--without-sizes")["faults"]) > 30


@pytest.fixture
def directory(tmp_path):
    return make_checkpoint(tmp_path / "checkpoint")


def refusal(directory: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read_checkpoint(directory)
    return str(caught.value)


def edit(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_the_truth_is_read(directory):
    assert fault_of(directory) is None
    assert read_checkpoint(directory).tensors["model.norm.weight"].shape == (8,)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be a whole number from 1 to 1024, got 1000000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 1024, got 0"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and the weights have no tensor of layer 2"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide the 2 attention heads, got 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}, "a multiple of the 3 attention"),
        ({"num_experts": 5000}, "num_experts is 5000, and the weights have 4 experts a layer"),
        ({"num_experts": 2}, "num_experts is 2, and the weights have 4 experts a layer"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be from 1 to the 4 experts of a layer, got 5"),
        ({"vocab_size": 33}, "model.embed_tokens.weight in model.safetensors has the shape [32, 8]"),
        ({"num_labels": 10**12}, "num_labels must be a whole number from 0 to 65536"),
        ({"rope_theta": -1}, "rope_theta must be a number above 0, got -1"),
        ({"layer_types": ["full_attention"]}, "layer_types must name the kind of each of the 2 layers, got 1 kinds"),
        ({"text_config": {"num_hidden_layers": -1}}, "num_hidden_layers must be a whole number from 1 to 1024, got -1"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_its_value_and_what_is_allowed(changes, text, directory):
    message = refusal(edit(directory, **changes))
    assert text in message
    assert str(directory / "config.json") in message


def test_tensors_beyond_their_file_and_over_each_other_are_refused(directory):
    file = directory / "model.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header, num_bytes, text in (
        ({"a": {**entry, "data_offsets": [8, 16]}}, 16, "where 0 to 16 are left"),
        ({"a": entry}, 4, "where 0 to 4 are left"),
        ({"a": entry, "b": entry}, 16, "where 8 to 16 are left"),
        ({"a": entry}, 16, "its tensors take 8 bytes, and it holds 16"),
        ({"a": {**entry, "shape": [1 << 31, 1 << 31]}}, 8, "needs 18446744073709551616 bytes and has 8"),
        ({"a": {**entry, "dtype": "X"}}, 8, "unknown dtype X"),
    ):
        write_tensors(file, header, num_bytes)
        assert text in refusal(directory)


def test_a_header_longer_than_its_file_is_not_allocated(directory):
    file = directory / "model.safetensors"
    file.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert "its header claims 1152921504606846976 bytes, and the file has 10" in refusal(directory)


def test_two_files_with_one_tensor_are_refused(directory):
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "b.safetensors").write_bytes((directory / "a.safetensors").read_bytes())
    assert f"is in {directory / 'a.safetensors'} and in {directory / 'b.safetensors'}" in refusal(directory)


def test_an_index_that_places_a_tensor_elsewhere_is_refused(directory):
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "model.lost.weight": "a.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "says that tensor model.lost.weight is in a.safetensors, and it is not" in refusal(directory)
