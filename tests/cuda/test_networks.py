"""Networks of each family give transformers' own logits on the GPU kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny

from moestro.model.cuda import exchange
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.network import Network

SIZES = {"num_hidden_layers": 2}
OWN_SIZES = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]}}


@pytest.fixture
def network_of(tmp_path, device, split, monkeypatch):
    """A function: (a family's network on the kernels, its directory)."""
    monkeypatch.setattr(exchange, "NUM_CHECK_ROWS", 4)

    def make(name: str) -> tuple[Network, object]:
        directory = tiny.save_checkpoint(tmp_path, tiny.make_config(name, **SIZES, **OWN_SIZES.get(name, {})))
        network = tiny.load(directory, device=device.type)
        network.probe(drive.BLOCK_SIZE)
        network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
        with torch.inference_mode():
            network.pack_linears()
            network.pack_experts()
        return network, directory

    return make


# One of them takes half a minute in the interpreter; `pytest -m "slow or gpu" tests/cuda` has all.
NAMES = [name if name == "qwen3_moe" else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_gets_the_logits_of_transformers(name, network_of):
    network, directory = network_of(name)
    print(f"{name}: {network.exchange.note} {network.exchange.num_planned} canonical layers")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, tiny.VOCAB, size=size).tolist() for size in (9, 4)]
    sequences = drive.drive(drive.make_device(drive.recording(network)), prompts, 2, rng)
    found = drive.compare(sequences, tiny.load_oracle(directory), name)
    assert found.wrong_tokens == 0
    assert found.largest < 2e-5
