"""Experts spread over processes: the greedy tokens of one process that has them all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support.expert_group import Task, run_alone, run_group
from support.expert_tables import scatter

from moestro.core.experts.expert_table import spread_evenly
from moestro.model.experts.spread_device import SpreadExperts


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_group_of_processes_gives_the_tokens_of_one_process(num_workers, checkpoint, tmp_path):
    """Every family with experts; idle workers, uneven placements with copies, and a skewed gate."""
    names = tiny.SPARSE if num_workers == 2 else ["qwen3_moe", "deepseek_v3", "gpt_oss"]
    tasks = [Task(checkpoint(name), seed=number if number % 2 else None) for number, name in enumerate(names)]
    tasks.append(Task(checkpoint("qwen3_moe"), override="exponential:2"))
    found = run_group(tasks, num_workers, tmp_path / "store")
    for task, by_worker in zip(tasks, found, strict=True):
        for worker, generated in enumerate(by_worker):
            assert generated == run_alone(task, worker), task


class Loopback:
    """The exchange of a group of one."""

    worker, num_workers = 0, 1

    def exchange_counts(self, counts):
        return counts.clone()

    def exchange_rows(self, rows, num_sent, num_received):
        assert num_sent == num_received == [len(rows)]
        return rows.clone()


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_slots_in_any_order_change_no_bit(name, dtype, checkpoint):
    """With all experts on one worker, batches are the same and so is every bit; packed or not."""
    units = drive.make_units([(0, [7, 8, 9, 10, 11, 30])], np.arange(2)[None], sampling=drive.greedy(num_logprobs=5))
    results = []
    for is_spread in (False, True):
        network = tiny.load(checkpoint(name), dtype=dtype)
        device = drive.make_device(network)
        if is_spread:
            table = scatter(np.random.default_rng(4), (network.num_layers, network.num_experts), [0], 1)
            network.keep_experts(table.logical_of[0])
            SpreadExperts(network, Loopback(), table)
        network.pack()
        result = drive.run(device, units)
        results.append((result.token_ids.tolist(), result.logprobs, result.expert_counts.tolist()))
    assert results[0] == results[1]


def test_a_cut_network_refuses_to_run_alone(checkpoint):
    network = tiny.load(checkpoint("qwen3_moe"))
    device = drive.make_device(network)
    table = spread_evenly(network.num_layers, network.num_experts, [0, 1], 2)
    network.keep_experts(table.logical_of[1])
    with pytest.raises(AssertionError, match="elsewhere"):
        drive.run(device, drive.make_units([(0, [7, 8])], np.zeros((1, 1))))


@pytest.mark.transformers
def test_dropped_experts_free_their_memory(checkpoint):
    network = tiny.load(checkpoint("mixtral"))
    table = spread_evenly(network.num_layers, network.num_experts, [0, 1, 2], 3)
    before = sum(p.untyped_storage().nbytes() for _, module in network.experts for p in module.parameters())
    network.keep_experts(table.logical_of[2])
    after = sum(p.untyped_storage().nbytes() for _, module in network.experts for p in module.parameters())
    assert after * 3 == before
    assert all(torch.isfinite(p).all() for _, module in network.experts for p in module.parameters())
