"""Experts that move between the ranks of a group while it serves: the tokens of one rank that has them all."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from parity import tiny
from support.fake_device import make_request
from support.lock_step_processes import SETTINGS, settings_of
from support.moving_ranks import CANCEL, MovingRanks
from support.moving_tables import random_target
from support.running import wait_until

from moestro.core.experts.expert_table import EMPTY
from moestro.core.request import Request
from moestro.engine.rank import build_rank
from moestro.model.device import open_device
from moestro.model.experts import expert_slots
from moestro.model.experts.expert_slots import num_expert_bytes, pick_expert, read_expert, to_bytes
from moestro.model.experts.routed import tag_of

NUM_REQUESTS = 10


def requests(rng: np.random.Generator) -> list[Request]:
    """Greedy and sampled requests, most of which have many steps."""
    return [
        make_request(
            f"r{number}",
            rng.integers(3, tiny.VOCAB, rng.integers(1, 20)).tolist(),
            max_tokens=int(rng.integers(4, 24)),
            temperature=float(number % 3 == 0),
            seed=number,
        )
        for number in range(NUM_REQUESTS)
    ]


def answers_alone(checkpoint, sent: list[Request], dtype: str = "float64") -> dict[str, list[int]]:
    rank = build_rank(SETTINGS, open_device(settings_of(checkpoint, dtype))[0])
    tokens: dict[str, list[int]] = {request.request_id: [] for request in sent}
    for request in sent:
        rank.add(request, 0)
    while rank.has_work:
        for output in rank.step(0):
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.fixture
def group(checkpoint):
    made: list[MovingRanks] = []

    def make(name: str, *args, **kwargs) -> MovingRanks:
        made.append(MovingRanks(checkpoint(name), *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def serve_while_moving(moving: MovingRanks, sent: list[Request], rng, max_bytes: int) -> tuple[int, int]:
    """Serve all requests; the next migration begins when one has ended. Returns layers that moved, and cancellations.

    A migration is cancelled at a random moment one time in three.
    """
    num_committed = num_cancelled = 0
    waiting = list(sent)
    while waiting or moving.running or moving.migration.progress.is_running:
        assert not moving.lost, moving.lost
        if waiting and (len(moving.running) < 4 or rng.random() < 0.02):
            moving.add(int(rng.integers(len(moving.ranks))), waiting.pop(0))
        moving.hear()
        if not moving.migration.progress.is_running:
            num_committed += moving.migration.progress.num_committed
            num_cancelled += moving.migration.progress.error == "cancelled"
            if waiting or moving.running:
                moving.migration.start(random_target(rng, moving.migration.table), max_bytes)
                if rng.random() < 0.34:
                    threading.Timer(float(rng.choice([0, 0.002, 0.01])), moving.events.put, (CANCEL,)).start()
        time.sleep(0.001)  # the ranks' threads need the interpreter
    return num_committed, num_cancelled


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_redundant"),
    [("qwen3_moe", 2, 0), ("qwen3_moe", 3, 4), ("deepseek_v3", 2, 4), ("gpt_oss", 2, 2)],
)
def test_tokens_are_those_of_one_rank_while_experts_move_in_every_step(
    name, num_ranks, num_redundant, checkpoint, group
):
    """Two experts a step at most; gates, biases, dense layers and transposed weights; with spare slots and without."""
    rng = np.random.default_rng(num_ranks + num_redundant)
    sent = requests(rng)
    moving = group(name, num_ranks, num_redundant)
    size = num_expert_bytes(moving.devices[0].network.experts[0][1])
    num_committed, num_cancelled = serve_while_moving(moving, sent, rng, 2 * size + 1)
    assert moving.tokens == answers_alone(checkpoint(name), sent)
    assert num_committed >= 5
    print(f"{name}: {num_committed} layers moved, {num_cancelled} migrations cancelled")
    assert max(max(each.most_sent, each.most_taken) for each in moving.exchanges) <= 2 * size
    wait_until(moving.all_sleep)
    tables = [device.placed for device in moving.devices]
    assert all(each == tables[0] for each in tables)
    assert (tables[0].table().logical_of == moving.migration.table.logical_of).all()


@pytest.mark.parametrize("num_redundant", [0, 3])
def test_slots_of_one_device_swap_experts_and_no_token_changes(num_redundant, checkpoint, group):
    """A device that has all experts, in cut modules."""
    rng = np.random.default_rng(8)
    sent = requests(rng)
    moving = group("qwen3_moe", 1, num_redundant)
    num_committed, _ = serve_while_moving(moving, sent, rng, 1)
    assert moving.tokens == answers_alone(checkpoint("qwen3_moe"), sent)
    assert num_committed >= 3
    assert moving.migration.progress.num_bytes == 0
    assert moving.exchanges[0].most_sent == 0


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt_oss", "float32"), ("qwen3_moe", "bfloat16"), ("qwen3_moe", "float64")]
)
def test_moved_weights_are_those_of_the_checkpoint_bit_for_bit_and_idle_ranks_sleep_again(
    name, dtype, checkpoint, group
):
    """Packed weights and others. No client sends a request: the group is awake for the moves only."""
    network = tiny.load(checkpoint(name), dtype=dtype)
    rng = np.random.default_rng(3)
    moving = group(name, 2, 4, dtype)
    size = num_expert_bytes(network.experts[0][1])
    wait_until(moving.all_sleep)
    num_bytes = 0
    for _ in range(3):
        target = random_target(rng, moving.migration.table)
        moving.migration.start(target, size)
        moving.settle()
        wait_until(moving.all_sleep)  # rank 0 reports a commit, and rank 1 may be about to do the same
        assert moving.migration.progress.num_committed == len(network.experts)
        num_bytes += moving.migration.progress.num_bytes
        for device in moving.devices:
            for place, (layer, module) in enumerate(device.network.experts):
                rows = target.logical_of[device._exchange.worker, place]
                assert (tag_of(module).logical_of == rows).all()
                for slot in np.flatnonzero(rows != EMPTY).tolist():
                    found = to_bytes(read_expert(module, slot))
                    kept = to_bytes(pick_expert(dict(network.experts)[layer], int(rows[slot])))
                    assert torch.equal(found, kept)
    assert num_bytes % size == 0
    assert num_bytes > 0
    assert not any(rank.has_work for rank in moving.ranks)
    assert moving.ranks[0].num_steps > 0, "a group that moves makes progress, as the watchdog sees it"
    assert moving.ranks[0].stats().lock_step.num_group_steps == 0


@pytest.mark.parametrize("num_redundant", [0, 4])
def test_a_dropped_layer_leaves_no_trace(num_redundant, checkpoint, group):
    """Cancelled at once or in the middle: slots that were free are free again, the others have what they had."""
    moving = group("qwen3_moe", 2, num_redundant, "float32")
    rng = np.random.default_rng(5)
    num_dropped = 0
    for number in range(6):
        table = moving.migration.table
        moving.migration.start(random_target(rng, table), 1)
        first = moving.ranks[0].num_steps
        wait_until(lambda n=first + number: moving.ranks[0].num_steps >= n or not moving.events.empty())
        moving.migration.cancel()
        moving.settle()
        if moving.migration.progress.num_committed == 0:
            assert moving.migration.table is table
            num_dropped += 1
    assert num_dropped > 0
    wait_until(moving.all_sleep)
    for device in moving.devices:
        rows = device.placed.table().logical_of[device._exchange.worker]
        assert (device.placed.table().logical_of == moving.migration.table.logical_of).all()
        for place, (_, module) in enumerate(device.network.experts):
            tag = tag_of(module)
            assert (tag.logical_of == rows[place]).all()
            assert all(
                bool(up.numel()) == (row != EMPTY) for (up, _), row in zip(tag.packed.slots, rows[place], strict=True)
            )


def test_a_rank_that_ends_between_prepare_and_commit_leaves_the_old_placement(checkpoint, group):
    """The group starts again with the layers that were committed, and its tokens are the same."""
    rng = np.random.default_rng(6)
    moving = group("qwen3_moe", 2, 4)
    first = moving.migration.table
    target = random_target(rng, first)
    moving.migration.start(target, 1)
    wait_until(lambda: not moving.events.empty())
    moving.exchanges[1].ends_when_prepared = True
    assert moving.hear()
    wait_until(lambda: len(moving.lost) == 2)
    assert not moving.hear(), "the second layer was not committed"
    moving.migration.ended(1)
    assert moving.migration.progress.error == "engine 1 ended"
    placed = moving.migration.placed
    assert placed is not None
    assert (placed.table().logical_of[:, 0] == target.logical_of[:, 0]).all()
    assert (placed.table().logical_of[:, 1:] == first.logical_of[:, 1:]).all()
    again = group("qwen3_moe", 2, 4, placed=placed)
    assert [device.placed for device in again.devices] == [placed, placed]
    sent = requests(rng)
    serve_while_moving(again, sent, rng, 1)
    assert again.tokens == answers_alone(checkpoint("qwen3_moe"), sent)


def test_weights_that_are_lost_on_their_way_are_noticed(checkpoint, group, monkeypatch):
    """The law can fail."""
    monkeypatch.setattr(expert_slots, "to_bytes", lambda weights: torch.zeros_like(to_bytes(weights)))
    rng = np.random.default_rng(2)
    sent = requests(rng)
    moving = group("qwen3_moe", 2, 0)
    serve_while_moving(moving, sent, rng, 10**9)
    assert moving.tokens != answers_alone(checkpoint("qwen3_moe"), sent)
