"""Every tested family on groups of workers that each have a share of it: the greedy tokens of the whole network."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from parity import drive, tiny
from support.fake_device import make_request
from support.linked_group import serve
from support.step_policies import Random
from support.torch_group import BLOCK_SIZE, Layout, TorchGroup

from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.core.request import ServiceClass
from moestro.flow.policies.basic import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.flow.registry import make_step_policy
from moestro.model.arena import Arena
from moestro.model.expert_files import load_experts

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


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_family_spread_over_workers_gives_the_tokens_of_the_whole_network(name, shape, checkpoint, fused):
    rng = np.random.default_rng(len(name))
    group = TorchGroup(rng, checkpoint(name), LAYOUTS[shape], POLICIES[shape], moods=(0.2, 0.01))
    assert serve(group, make_requests()) == fused(name, "float64")
    if group.devices[0].shape.num_chosen:
        assert group.num_messages > 0


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
    """A table in which one expert of each layer lives on another worker, and (worker, layer, slot, expert) of each."""
    logical_of, moves = table.logical_of.copy(), []
    for layer in range(logical_of.shape[1]):
        worker, slot = np.argwhere(logical_of[:, layer] != EMPTY)[0].tolist()
        expert = int(logical_of[worker, layer, slot])
        target = next(w for w in range(len(logical_of) - 1, 0, -1) if (logical_of[w, layer] != EMPTY).any())
        assert target != worker
        assert expert not in logical_of[target, layer]
        empty = int(np.flatnonzero(logical_of[target, layer] == EMPTY)[0])
        logical_of[worker, layer, slot], logical_of[target, layer, empty] = EMPTY, expert
        moves.append((target, layer, empty, expert))
    return ExpertTable(table.version + 1, logical_of, table.num_experts, table.is_alive), moves


def test_experts_move_to_other_slots_while_tokens_are_inside(checkpoint, fused):
    """Empty slots get experts from the checkpoint; then the homes change to a table without the old copies."""
    directory = checkpoint("deepseek_v3")
    layout = Layout(num_homes=2, num_expert_workers=2)
    group = TorchGroup(np.random.default_rng(6), directory, layout, POLICIES["1+1"])
    table, moves = exchange_homes(group.table)
    turn, num_inside = group.turn, []

    def turn_and_move(now_ns: int) -> list:
        if not num_inside and all(executor._core.num_plans for executor in group.executors[:2]):
            num_inside.append(sum(executor._core.num_plans for executor in group.executors[:2]))
            for worker, layer, slot, expert in moves:
                if group.devices[worker].shape.is_sparse[layer]:
                    settings = tiny.settings_of(directory, dtype="float64")
                    load_experts(group.devices[worker].network, settings, layer, {slot: expert})
            for executor in group.executors[:2]:
                executor.change_table(table, now_ns)
        return turn(now_ns)

    group.turn = turn_and_move
    assert serve(group, make_requests()) == fused("deepseek_v3", "float64")
    assert num_inside


READ_CONTRIBUTIONS = Arena.read_contributions


def test_a_wrong_contribution_is_detected(checkpoint, fused, monkeypatch):
    monkeypatch.setattr(Arena, "read_contributions", lambda *args: READ_CONTRIBUTIONS(*args).flip(0))
    group = TorchGroup(np.random.default_rng(1), checkpoint("qwen3_moe"), LAYOUTS["1+1"], POLICIES["1+1"])
    assert serve(group, make_requests()) != fused("qwen3_moe", "float64")
