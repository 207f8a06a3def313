"""Recorded steps: a replay has the bits of a step that is launched, and a layer is twelve launches."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support.imitated_graph import imitate_graphs
from torch.overrides import TorchFunctionMode

from moestro.model.attention import STEP_ARGUMENT
from moestro.model.cuda import graphs, tiles
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.graphs import GraphShape
from moestro.model.cuda.tiles import replace_launcher
from moestro.model.network import Network
from moestro.model.step import PagedStep

FRONT = ["add_norm", "linear", "heads", "attend", "linear", "add_norm"]
LAYER = [*FRONT, "linear", "choose", "sort_pairs", "expert_up", "expert_down", "add_answers"]
# Functions of tensors that compute nothing on a device.
FREE = {
    "__get__", "__getitem__", "__len__", "contiguous", "data_ptr", "dim", "element_size", "empty", "empty_like",
    "is_contiguous", "new_empty", "numel", "reshape", "size", "stride", "transpose", "unbind", "view",
}  # fmt: skip


def exchanged(family: str, directory: Path, device: torch.device) -> Network:
    """A network of one layer, on own kernels."""
    kinds = getattr(tiny.make_config(family), "layer_types", None)
    first = {} if kinds is None else {"layer_types": kinds[:1]}
    tiny.save_checkpoint(directory, tiny.make_config(family, num_hidden_layers=1, **first))
    network = Network(tiny.load(directory).model.to(device))
    network.probe(16, 8)
    network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
    network.pack_linears()
    network.pack_experts()
    return network


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_replayed_steps_have_the_bits_of_launched_ones(family, tmp_path, device, monkeypatch):
    """Decodes and chunks in random company, in graphs that they do not fill, and without graphs."""
    if device.type == "cpu":
        imitate_graphs(monkeypatch)
    for module in (graphs, tiles):
        monkeypatch.setattr(module, "WIDE_QUERIES", 4)
    monkeypatch.setattr(graphs, "graph_shapes", lambda *_: [GraphShape(6), GraphShape(12, has_chunks=True)])
    monkeypatch.setattr(graphs, "_LONGER_STEPS", (20,))  # more take a minute in an interpreter
    network = exchanged(family, tmp_path, device)
    target = drive.make_device(network)
    recorded = graphs.plan_graphs(network, 6, 512, 16, max_tokens=12).record(network, target.pools)
    assert recorded is not None
    seen = {"chunks": 0, "decodes": 0, "launched": 0}

    class Both:
        def logits(self, step: PagedStep) -> torch.Tensor | None:
            replayed = recorded.logits(step)
            has_chunks = bool((step.num_tokens_of >= 4).any())
            seen["launched" if replayed is None else "chunks" if has_chunks else "decodes"] += 1
            if replayed is None:
                return None
            replayed, counts = replayed.clone(), network.routing.counts.clone()
            launched = network.logits(step)
            assert torch.equal(replayed, launched)
            assert torch.equal(counts, network.routing.counts)
            return launched

    target.replay(Both())
    monkeypatch.setattr(drive, "record", lambda *_: None)
    rng = np.random.default_rng(0)
    sequences = drive.admit([rng.integers(3, tiny.VOCAB, n).tolist() for n in (5, 9)], 2, rng)
    while going := [each for each in sequences if len(each.tokens) < each.num_prompt + 2]:
        chosen = [going[i] for i in rng.permutation(len(going))[: rng.integers(1, len(going) + 1)]]
        drive.step(target, chosen, rng)
    assert min(seen["chunks"], seen["decodes"]) >= 1


class _Operations(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(names: list[str]):
    before = replace_launcher(lambda kernel, *_: names.append(kernel.fn.__name__))
    try:
        yield
    finally:
        replace_launcher(before)


@pytest.mark.parametrize("num_rows", [1, 2])
@torch.inference_mode()
def test_a_canonical_layer_is_twelve_launches_and_computes_nothing_beside_them(num_rows, tmp_path, device):
    """Eleven for one row, whose experts need no sorting."""
    network = exchanged("qwen3_moe", tmp_path, device)
    assert network.exchange.num_planned == network.num_layers
    pools = network.probe(16)[0].allocate(40)
    # Contexts that are cut into splits.
    units = drive.make_units([(300, [3]), (290, [4])][:num_rows], np.arange(40).reshape(2, 20)[:num_rows])
    step, layer = PagedStep(units, pools, device), network.model.model.layers[0]
    hidden = torch.zeros(1, num_rows, network.config.hidden_size, device=device)
    angles = tuple(torch.zeros(1, num_rows, network.config.head_dim, device=device) for _ in range(2))
    network.exchange.kernels.units_of(step)
    assert step.write_slots.shape == (num_rows,)
    launched: list[str] = []
    with counted(launched), _Operations() as operations:
        layer(hidden, position_embeddings=angles, **{STEP_ARGUMENT: step})
    assert launched == [name for name in LAYER if num_rows > 1 or name != "sort_pairs"]
    assert operations.names <= FREE
