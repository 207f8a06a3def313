"""Recorded layers: replays have the bits of launched layers in any history, and cost the host two calls a layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from parity import drive, tiny
from support.imitated_graph import ImitatedGraph, imitate_graphs
from support.torch_stages import NO_MERGES
from torch.overrides import TorchFunctionMode

from moestro.core.stages import (
    Attention,
    AttentionDone,
    Experts,
    Merge,
    Merges,
    Passage,
    Sample,
    StageItem,
    StageResult,
    StageShape,
    Stopped,
)
from moestro.core.work import StepResult, Units
from moestro.model.cuda import exchange, layer_graphs
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaKernels
from moestro.model.cuda.graphs import GraphShape
from moestro.model.cuda.tiles import replace_launcher
from moestro.model.network import Network
from moestro.model.staged.staged_device import StagedTorchDevice
from moestro.model.staged.staged_network import StagedNetwork

SIZES, NUM_ROWS, NUM_BLOCKS, MAX_LEN = (1, 5), 24, 32, 128
CHANGES = {
    "qwen3_moe": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek_v3": {"num_hidden_layers": 3, "first_k_dense_replace": 1},
}
# Layers of equal form, of which one is recorded. Those of DeepSeek write K and V without a kernel: each is recorded.
FORMS = {"qwen3_moe": 1, "gpt_oss": 2, "deepseek_v3": 3}
_KNOWN: dict[tuple[str, str], StagedNetwork] = {}  # one takes half a minute in an interpreter


@pytest.fixture
def staged(tmp_path, device, split, monkeypatch):
    """A function: a family's network in stages, on own kernels."""
    monkeypatch.setattr(exchange, "NUM_CHECK_ROWS", 4)
    monkeypatch.setattr(layer_graphs, "graph_shapes", lambda *_: list(map(GraphShape, SIZES)))
    if device.type == "cpu":
        imitate_graphs(monkeypatch)
        monkeypatch.setattr("moestro.model.network.can_pack", lambda *_: False)  # as on a GPU

    def make(family: str) -> StagedNetwork:
        key = family, device.type
        if key not in _KNOWN:
            directory: Path = tiny.save_checkpoint(tmp_path, tiny.make_config(family, **CHANGES[family]))
            network = Network(tiny.load(directory).model.to(device))
            for parameter in network.model.parameters():
                parameter.data = parameter.data.clone()  # aligned, as memory of a GPU is
            network.probe(drive.BLOCK_SIZE, 4)
            network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
            network.pack_linears()
            _KNOWN[key] = StagedNetwork(network)
            network.pack_experts()
        return _KNOWN[key]

    return make


def open_device(staged: StagedNetwork) -> StagedTorchDevice:
    probe, num_chosen = staged.network.probe(drive.BLOCK_SIZE)
    shape = StageShape(
        is_sparse=staged.is_sparse, num_experts=staged.network.num_experts, num_chosen=num_chosen,
        num_rows=NUM_ROWS, num_places=NUM_ROWS,
    )  # fmt: skip
    return StagedTorchDevice(staged, probe.allocate(NUM_BLOCKS), shape, piece_bytes=1)


def record(device: StagedTorchDevice) -> layer_graphs.LayerGraphs:
    plan = layer_graphs.plan_layer_graphs(device.network, 6, MAX_LEN, drive.BLOCK_SIZE, max_tokens=12)
    assert plan is not None
    graphs = plan.record(device.staged, device.pools)
    assert graphs is not None
    device.replay(graphs)
    return graphs


def run(device: StagedTorchDevice, item: StageItem, patience: int | None = None) -> StageResult:
    device.launch(item, 0)
    for number in range(1000):
        if number == patience:
            device.withdraw(0)
        if done := device.poll(0):
            return done[0]
    raise AssertionError("an item has no end")


def state(device: StagedTorchDevice) -> Iterator[torch.Tensor]:
    """All that is kept of tokens inside the network, and K and V."""
    arena = device._runner.arena
    yield from (arena._hidden, arena._inputs, arena._contributions, arena._weights, *device.pools.blocks())


class Pair:
    """A device that replays layers and one that launches them, which have to agree after each item."""

    def __init__(self, staged: StagedNetwork) -> None:
        self.replaying, self.launching = open_device(staged), open_device(staged)
        self.graphs = record(self.replaying)
        self.num_layers = staged.network.num_layers

    def run(self, item: StageItem) -> StageResult:
        found, wanted = run(self.replaying, item), run(self.launching, item)
        self.compare(found, wanted)
        return found

    def compare(self, found: StageResult, wanted: StageResult) -> None:
        assert type(found) is type(wanted)
        for name in ("topk_ids", "token_ids", "logprobs", "expert_counts", "layer", "first_open"):
            mine, theirs = getattr(found, name, None), getattr(wanted, name, None)
            assert (mine is None) == (theirs is None), name
            if mine is not None:
                np.testing.assert_array_equal(mine, theirs, name)
        for mine, theirs in zip(state(self.replaying), state(self.launching), strict=True):
            assert torch.equal(mine, theirs)


class Group:
    """Units inside the network: where they are, and what their next item has to merge."""

    def __init__(self, units: Units, rows: np.ndarray) -> None:
        self.units, self.rows = units, rows.astype(np.int32)
        self.layer, self.merges = 0, NO_MERGES
        self.result: StepResult | None = None

    def advance(self, pair: Pair, rng: np.random.Generator) -> None:
        """One random item, and what has to follow it."""
        kind = rng.random()
        if self.layer == pair.num_layers:
            self.result = pair.run(Sample(self.units, self.rows, self.merges))
        elif kind < 0.2 and len(self.merges):
            pair.run(Merge(self.layer - 1, self.merges))
            self.merges = NO_MERGES
        elif kind < 0.5:
            until = int(rng.integers(self.layer + 1, pair.num_layers + 2))
            done = pair.run(Passage(self.layer, until, self.units, self.rows, self.rows, self.merges))
            self.result = None if isinstance(done, Stopped) else done
            self.layer, self.merges = until, NO_MERGES
        else:
            self.attend(pair, rng)

    def attend(self, pair: Pair, rng: np.random.Generator) -> None:
        done = pair.run(Attention(self.layer, self.units, self.rows, self.rows, self.merges))
        assert isinstance(done, AttentionDone)
        self.layer, self.merges = self.layer + 1, NO_MERGES
        if done.topk_ids is None:
            return
        token, choice = np.nonzero(done.topk_ids >= 0)
        experts = done.topk_ids[token, choice]
        for part in np.array_split(rng.permutation(np.unique(experts)), 2):
            if len(part):
                chosen = np.concatenate([np.flatnonzero(experts == expert) for expert in part])
                counts = np.array([(experts == expert).sum() for expert in part], np.int32)
                places, choices = self.rows[token[chosen]], choice[chosen].astype(np.int32)
                pair.run(Experts(self.layer - 1, part.astype(np.int32), counts, places, choices))
        self.merges = Merges(self.rows, self.rows)


def groups_of(rng: np.random.Generator, num: int) -> Iterator[Group]:
    """Units of random sequences: decodes, and chunks of which some are longer than any graph."""
    first_row, blocks = 0, rng.permutation(NUM_BLOCKS)
    for group in range(num):
        sizes = [int(each) for each in rng.choice([1, 1, 2, 4], rng.integers(1, 4))]
        parts = [(0 if size > 1 else int(rng.integers(0, 40)), rng.integers(3, tiny.VOCAB, size).tolist())
                 for size in sizes]  # fmt: skip
        tables = np.resize(blocks[group * 10 : group * 10 + 10], (len(sizes), 10))
        rows = np.arange(first_row, first_row + sum(sizes))
        first_row += sum(sizes)
        if first_row <= NUM_ROWS:
            yield Group(drive.make_units(parts, tables, write_start=np.zeros(len(sizes), np.int32)), rows)


FAMILIES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "deepseek_v3"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_layers_have_the_bits_of_launched_ones_in_any_history(family, staged):
    pair, rng = Pair(staged(family)), np.random.default_rng(0)
    assert pair.graphs.num_graphs == 2 * FORMS[family] * len(SIZES)  # up to the gate, and whole
    going = list(groups_of(rng, 3))
    while going:
        group = going[rng.integers(len(going))]
        group.advance(pair, rng)
        going = [each for each in going if each.result is None]


def test_a_withdrawn_passage_stops_between_two_replayed_layers(staged):
    pair = Pair(staged("qwen3_moe"))
    group = next(groups_of(np.random.default_rng(1), 1))
    item = Passage(0, pair.num_layers + 1, group.units, group.rows, group.rows, NO_MERGES)
    stopped = run(pair.replaying, item, 1)
    assert isinstance(stopped, Stopped)
    assert stopped.layer == 1 + (not pair.replaying.works_when_polled)  # an accelerator is one piece ahead
    pair.compare(stopped, run(pair.launching, msgspec.structs.replace(item, until=stopped.layer)))


class _Calls(TorchFunctionMode):
    """Counts operations that a device would run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


FREE = {"__get__", "__getitem__", "__len__", "data_ptr"}


@torch.inference_mode()
def test_a_replayed_layer_is_one_copy_and_one_replay(staged, monkeypatch):
    network = staged("qwen3_moe")
    device = open_device(network)
    graphs, group = record(device), next(groups_of(np.random.default_rng(1), 1))
    fragment, hidden = device._runner._fragments.enter(group.units, group.rows)
    replayed = graphs.open(fragment)
    hidden = replayed.whole(1, hidden)
    replays, launches = [], []
    if network.network.device.type == "cpu":
        monkeypatch.setattr(ImitatedGraph, "replay", lambda _: replays.append(1))
    before = replace_launcher(lambda kernel, *_: launches.append(kernel))
    try:
        with _Calls() as calls:
            for layer in (0, 1):
                hidden = replayed.whole(layer, hidden)
    finally:
        replace_launcher(before)
    assert [name for name in calls.names if name not in FREE] == ["copy_"] * 2
    assert not launches
    assert len(replays) in (0, 2)
