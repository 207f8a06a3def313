"""Places of the torch device as seen from other devices: inputs and contributions go out and come in unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support.torch_stages import NO_MERGES, finish, make_merges, make_staged_device

from moestro.core.stages import Attention, Experts, Passage, Sample
from moestro.model.staged.arena import Arena

NUM_TOKENS, NUM_PLACES, NUM_REMOTE_PLACES = 5, 6, 7
ROWS = np.arange(NUM_TOKENS, dtype=np.int32)


def make_device(checkpoint, dtype: str = "float32", name: str = "qwen3_moe"):
    network = tiny.load(checkpoint(name), dtype=dtype)
    return make_staged_device(
        network, drive.BLOCK_SIZE, 8, num_rows=NUM_TOKENS, num_places=NUM_PLACES, num_remote_places=NUM_REMOTE_PLACES
    )


def noise(device, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).to(device.staged.network.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "places", [[0, 1, 2], [5, 6, 7], [12, 3, 0, 7], [4]], ids=["own", "own and remote", "mixed", "one"]
)
def test_stored_rows_are_read_unchanged(dtype, places, checkpoint):
    device = make_device(checkpoint, dtype)
    at, size = np.array(places, np.int32), device.staged.network.config.hidden_size
    inputs = noise(device, len(at), size)
    device.store_inputs(at, inputs)
    assert torch.equal(device.read_inputs(at), inputs)
    assert torch.equal(device.read_inputs(at[::-1]), inputs.flip(0))
    assert torch.equal(device.read_inputs(np.repeat(at, 2)), inputs.repeat_interleave(2, 0))

    num_chosen = device.shape.num_chosen
    pairs, choices = np.repeat(at, num_chosen), np.tile(np.arange(num_chosen, dtype=np.int32), len(at))
    answers = noise(device, len(pairs), size)
    order = np.random.default_rng(0).permutation(len(pairs))
    device.store_contributions(pairs[order], choices[order], answers[order])
    assert torch.equal(device.read_contributions(pairs, choices), answers)
    assert torch.equal(device.read_inputs(at), inputs)


def test_no_rows_are_stored_and_read(checkpoint):
    device = make_device(checkpoint)
    none, size = np.empty(0, np.int32), device.staged.network.config.hidden_size
    device.store_inputs(none, torch.empty(0, size))
    device.store_contributions(none, none, torch.empty(0, size))
    assert device.read_inputs(none).shape == (0, size)
    assert device.read_contributions(none, none).shape == (0, size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_of_another_device_give_the_same_token(dtype, checkpoint):
    """Inputs travel to remote places of a second device, and its answers travel back, in every layer."""
    home, helper = make_device(checkpoint, dtype), make_device(checkpoint, dtype)
    units = drive.make_units([(0, [7, 8, 9, 10, 11])], np.array([[0, 1]]), sampling=drive.greedy(num_logprobs=2))
    passage = Passage(0, home.shape.num_layers + 1, units, ROWS, ROWS, NO_MERGES)
    alone, merges = finish(home, passage), NO_MERGES
    for layer in range(home.shape.num_layers):
        places = np.random.default_rng(layer).permutation(NUM_PLACES)[:NUM_TOKENS].astype(np.int32)
        ids = finish(home, Attention(layer, units, ROWS, places, merges)).topk_ids
        remote = NUM_PLACES + 1 + ROWS
        helper.store_inputs(remote, home.read_inputs(places))
        token, choice = np.divmod(ids.reshape(-1).argsort(kind="stable").astype(np.int32), ids.shape[1])
        experts, counts = np.unique(ids, return_counts=True)
        finish(helper, Experts(layer, experts, counts.astype(np.int32), remote[token], choice))
        home.store_contributions(places[token], choice, helper.read_contributions(remote[token], choice))
        merges = make_merges([(ROWS, places)])
    result = finish(home, Sample(units, ROWS, merges))
    assert result.token_ids.tolist() == alone.token_ids.tolist()
    assert result.logprobs == alone.logprobs


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe", "deepseek_v2", "qwen2"])
def test_the_stated_bytes_are_those_of_the_arena(name, checkpoint):
    staged, shape = make_device(checkpoint, name=name).staged, make_device(checkpoint, name=name).shape
    form = staged.token_form(shape.num_chosen)
    arena = Arena(shape, form, staged.network.device)
    own = [arena._hidden, *arena._columns, arena._weights, arena._mixed]
    own += [each[: shape.num_places] for each in (arena._inputs, arena._contributions)]
    stated = shape.num_rows * form.row_bytes + shape.num_places * form.place_bytes
    assert sum(tensor.nelement() * tensor.element_size() for tensor in own) == stated
