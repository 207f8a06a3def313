"""`moestro serve DIR` on a checkpoint that must not be read: status 2, and the last line says why."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.running import PATIENCE_S, REAL, Running

from moestro.errors import ConfigError
from moestro.text.tokenizer import Tokenizer


@pytest.fixture
def checkpoint(demo_dir, tmp_path):
    return shutil.copytree(demo_dir, tmp_path / "checkpoint")


class Payload:
    """Unpickled, it leaves a trace."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def name_a_pickle(checkpoint):
    torch.save(Payload(checkpoint.parent / "executed"), checkpoint / "evil.bin")
    (checkpoint / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "evil.bin"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    return "names the weight file 'evil.bin': only .safetensors files beside it are read. Convert the weights"


def nest_deeply(checkpoint):
    (checkpoint / "config.json").write_text('{"a": ' * 100_000)
    return "config.json is nested more than 32 levels deep."


def promise_layers(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text()) | {"num_hidden_layers": 10**12}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return "num_hidden_layers must be a whole number from 1 to 1024, got 1000000000000."


def put_a_fifo(checkpoint):
    (checkpoint / "tokenizer_config.json").unlink()
    os.mkfifo(checkpoint / "tokenizer_config.json")
    return "tokenizer_config.json is a FIFO, not a regular file"


def poison_a_norm(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.2.input_layernorm.weight"][7] = torch.inf
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    return "The weights hold NaN or infinity in model.layers.2.input_layernorm.weight"


# All other reasons are in tests/model/test_refuse.py and tests/core/test_lying_checkpoints.py; the last comes from an
# engine, and the others from the API server.
@pytest.mark.parametrize("spoil", [name_a_pickle, nest_deeply, promise_layers, put_a_fifo, poison_a_norm])
def test_it_is_status_2_with_the_reason_last(spoil, checkpoint, tmp_path):
    reason = spoil(checkpoint)
    server = Running((*REAL, str(checkpoint)), tmp_path, wait=False)
    try:
        assert server.process.wait(PATIENCE_S) == 2
    finally:
        server.kill()
    last_line = server.text.strip().splitlines()[-1]
    assert last_line.startswith("moestro: ")
    assert reason in last_line
    assert "Traceback" not in server.text
    assert not (tmp_path / "executed").exists()


def test_a_tokenizer_reads_no_link_out_of_its_directory(checkpoint, tmp_path):
    (tmp_path / "secret").write_text("{{ messages }}")
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="outside of the checkpoint's directory"):
        Tokenizer(checkpoint)
