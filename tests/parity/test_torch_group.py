"""Every tested family on groups of workers that each have a share of it: the greedy tokens of the whole network."""

from __future__ import annotations

import itertools
from functools import cache

import msgspec
import numpy as np
import pytest
import regex
import torch
from parity import drive, tiny
from support.fake_device import make_request
from support.linked_group import serve
from support.plain_grammar import backend, light, token_texts
from support.step_policies import Random
from support.torch_group import BLOCK_SIZE, Layout, TorchGroup

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.request import SamplingParams, ServiceClass
from moestro.flow.policies.one_queue import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.flow.registry import make_step_policy
from moestro.model.experts.expert_open import TorchSlots
from moestro.model.staged.arena import Arena

NUM_NEW = 4
LAYOUTS = {
    "1+1": Layout(num_homes=1, num_expert_workers=1),
    "2+2": Layout(num_homes=2, num_expert_workers=2, num_copies=2),
    "2 colocated": Layout(num_homes=2, num_expert_workers=0, num_copies=1),
}
POLICIES = {
    "1+1": lambda worker: in_order,
    "2+2": lambda worker: make_step_policy("defrag", 300e-9) if worker % 2 else Random(worker),
    "2 colocated": lambda worker: ExpertLevelPreemption(max_wait_ns=300, max_merged=4),
}


def make_requests() -> list:
    """Three requests of two classes, two of which share a prefix."""
    rng, requests = np.random.default_rng(8), []
    stem = rng.integers(3, tiny.VOCAB, 9)
    for i, length in enumerate((3, 7, 1)):
        prompt = rng.integers(3, tiny.VOCAB, length)
        prompt = prompt if length == 1 else np.concatenate([stem, prompt])
        request = make_request(f"r{i}", prompt, block_size=BLOCK_SIZE, arrival_ns=i, max_tokens=NUM_NEW)
        service_class = ServiceClass.LS if i % 2 else ServiceClass.BE
        requests.append(msgspec.structs.replace(request, service_class=service_class))
    return requests


@pytest.fixture(scope="module")
def fused(checkpoint):
    """A function: the tokens that whole steps of the whole network generate, by request."""

    @cache
    def generate(name: str, dtype: str) -> dict[str, list[int]]:
        device = drive.make_device(drive.recording(tiny.load(checkpoint(name), dtype=dtype)))
        requests, rng = make_requests(), np.random.default_rng(0)
        sequences = drive.drive(device, [each.token_array().tolist() for each in requests], NUM_NEW, rng)
        return {each.request_id: s.tokens[s.num_prompt :] for each, s in zip(requests, sequences, strict=True)}

    return generate


# Each family under one layout, and a family of each kind of gate and attention under all.
_IN_TURN = zip(tiny.FAMILIES, itertools.cycle(LAYOUTS), strict=False)
SPREAD = sorted({*_IN_TURN, *itertools.product(["qwen3_moe", "deepseek_v3", "gpt_oss"], LAYOUTS)})


@pytest.mark.parametrize(("name", "shape"), SPREAD)
def test_a_family_spread_over_workers_gives_the_tokens_of_the_whole_network(name, shape, checkpoint, fused):
    rng = np.random.default_rng(len(name))
    group = TorchGroup(rng, checkpoint(name), LAYOUTS[shape], POLICIES[shape], moods=(0.2, 0.01))
    assert serve(group, make_requests()) == fused(name, "float64")
    if group.devices[0].shape.num_chosen:
        assert group.num_messages > 0


@pytest.mark.parametrize("shape", LAYOUTS)
def test_homes_follow_grammars(shape, checkpoint):
    """Each home samples for its own requests, with masks of its own."""
    grammar = light("([a-c]{1,3}[0-9]?){1,4}")
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, grammar=grammar)
    requests = [msgspec.structs.replace(request, sampling=sampling) for request in make_requests()]
    found = []
    for layout in (LAYOUTS[shape], Layout(num_homes=1, num_expert_workers=0)):
        group = TorchGroup(np.random.default_rng(5), checkpoint("qwen3_moe"), layout, POLICIES[shape])
        for rank in group.ranks:
            rank.scheduler.use_grammars(backend(tiny.VOCAB))
        found.append(serve(group, requests))
    assert found[0] == found[1]
    for tokens in found[0].values():
        text = "".join(token_texts(tiny.VOCAB)[token] or "" for token in tokens)
        assert regex.fullmatch(grammar.text, text, partial=True)
        assert text


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_packed_shares_give_the_same_tokens(name, checkpoint, fused):
    layout = Layout(num_homes=1, num_expert_workers=2, dtype="float32")
    group = TorchGroup(np.random.default_rng(1), checkpoint(name), layout, POLICIES["2+2"])
    assert serve(group, make_requests()) == fused(name, "float32")


def test_half_precision_travels_unchanged(checkpoint):
    """A single request on a lone home and on one with an expert worker: the same batches, so the same bits."""
    found = []
    for others in (0, 1):
        layout = Layout(num_homes=1, num_expert_workers=others, num_credits=40, dtype="bfloat16")
        group = TorchGroup(np.random.default_rng(1), checkpoint("qwen3_moe"), layout, POLICIES["1+1"])
        found.append(serve(group, make_requests()[:1]))
    assert found[0] == found[1]


def exchange_homes(table: ExpertTable) -> tuple[ExpertTable, list[tuple[int, int, int, int]]]:
    """A table in which the fullest worker of each layer gave its first expert away; (worker, layer, slot, expert)."""
    logical_of, moves = table.logical_of.copy(), []
    holders = np.flatnonzero((logical_of != EMPTY).any(axis=(1, 2)))
    for layer in range(logical_of.shape[1]):
        sizes = (logical_of[holders, layer] != EMPTY).sum(axis=1)
        source, target = holders[sizes.argmax()], holders[::-1][sizes[::-1].argmin()]
        slot = int(np.flatnonzero(logical_of[source, layer] != EMPTY)[0])
        expert = int(logical_of[source, layer, slot])
        assert expert not in logical_of[target, layer]
        empty = int(np.flatnonzero(logical_of[target, layer] == EMPTY)[0])
        logical_of[source, layer, slot], logical_of[target, layer, empty] = EMPTY, expert
        moves.append((int(target), layer, empty, expert))
    return ExpertTable(table.version + 1, logical_of, table.num_experts, table.is_alive), moves


class Mover:
    """Moves experts of a group again and again. Slots that were given up get other experts once the homes are settled.

    Args:
        settings: Those of the devices.
    """

    def __init__(self, group: TorchGroup, settings) -> None:
        self.group, self.table, self.num_moves = group, group.table, 0
        self._given_up: list[tuple[int, int, int]] = []
        self._memory = [TorchSlots(device.network, settings) for device in group.devices]

    def turn(self, now_ns: int) -> None:
        homes = self.group.executors[: self.group.num_homes]
        if self._given_up:
            if all(home.is_settled for home in homes):
                for worker, layer, slot in self._given_up:
                    if self.group.executors[worker].is_slot_idle(layer, slot):
                        self._load(worker, layer, slot, expert=0)
                self._given_up = []
        elif self.num_moves < 3 and all(home._core.num_plans for home in homes):
            before = self.table
            self.table, moves = exchange_homes(before)
            for move in moves:
                self._load(*move)
            self._given_up = np.argwhere((before.logical_of != EMPTY) & (self.table.logical_of == EMPTY)).tolist()
            for home in homes:
                home.change_table(self.table, now_ns)
            self.num_moves += 1

    def _load(self, worker: int, layer: int, slot: int, expert: int) -> None:
        if self.group.devices[worker].shape.is_sparse[layer]:
            memory = self._memory[worker]
            memory.write(layer, slot, expert, *memory.read(layer, [expert]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_experts_move_again_and_again_while_tokens_are_inside(dtype, checkpoint, fused):
    """Packed experts in float32. A token that used a slot too late would meet another expert there."""
    directory = checkpoint("deepseek_v3")
    layout = Layout(num_homes=2, num_expert_workers=2, dtype=dtype)
    group = TorchGroup(np.random.default_rng(6), directory, layout, POLICIES["1+1"])
    mover, turn = Mover(group, tiny.settings_of(directory, dtype=dtype)), group.turn

    def turn_and_move(now_ns: int) -> list:
        mover.turn(now_ns)
        return turn(now_ns)

    group.turn = turn_and_move
    assert serve(group, make_requests()) == fused("deepseek_v3", dtype)
    assert mover.num_moves > 1


@pytest.mark.transformers
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_torch_s_default_dtype_changes_no_token(name, checkpoint, fused):
    """transformers sets it while it builds a layer that a thread reads, and it counts for all threads."""
    group = TorchGroup(np.random.default_rng(1), checkpoint(name), LAYOUTS["2 colocated"], POLICIES["1+1"])
    expected, before = fused(name, "float64"), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert serve(group, make_requests()) == expected
    finally:
        torch.set_default_dtype(before)


READ_CONTRIBUTIONS = Arena.read_contributions


def test_a_wrong_contribution_is_detected(checkpoint, fused, monkeypatch):
    monkeypatch.setattr(Arena, "read_contributions", lambda *args: READ_CONTRIBUTIONS(*args).flip(0))
    group = TorchGroup(np.random.default_rng(1), checkpoint("qwen3_moe"), LAYOUTS["1+1"], POLICIES["1+1"])
    assert serve(group, make_requests()) != fused("qwen3_moe", "float64")
