"""Workers of a group on the GPU kernels: the tokens of one device that has the whole network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support.expert_tables import scatter
from support.fake_device import make_request
from support.linked_group import serve
from support.torch_group import BLOCK_SIZE, Layout, TorchGroup

from moestro.flow.policies.one_queue import in_order
from moestro.model import device as device_under_test
from moestro.model.cuda import exchange
from moestro.model.cuda.exchange import CudaExchange
from moestro.model.cuda.functions import CudaExperts, CudaKernels
from moestro.model.experts import expert_open
from moestro.model.experts.routed import in_place_of
from moestro.model.experts.spread_device import SpreadExperts
from moestro.model.network import Network

NUM_NEW = 2
PROMPTS = ([7, 8, 9, 30, 11], [12, 40])


@pytest.fixture
def directory(tmp_path, device, split, monkeypatch):
    """A checkpoint whose networks all get the kernels."""
    if device.type == "cuda":
        pytest.skip("the devices of the group are opened on the CPU")
    monkeypatch.setattr(exchange, "NUM_CHECK_ROWS", 4)

    def use_own(network: Network, *_: object) -> tuple[str, ...]:
        network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
        return ()

    for room in (device_under_test, expert_open):
        monkeypatch.setattr(room, "choose_kernels", use_own)
    return tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3_moe", num_hidden_layers=2))


def whole_network(directory) -> Network:
    network = tiny.load(directory)
    network.probe(drive.BLOCK_SIZE)
    network.use_kernels(CudaExchange(CudaKernels(network.device, network.dtype)))
    return network


def tokens_alone(directory) -> list[list[int]]:
    network = whole_network(directory)
    network.pack()
    sequences = drive.drive(drive.make_device(drive.recording(network)), [*PROMPTS], NUM_NEW, np.random.default_rng(0))
    return [each.tokens[each.num_prompt :] for each in sequences]


def test_workers_with_experts_alone_compute_with_the_kernels(directory, monkeypatch):
    calls = []
    answers = CudaExperts.answers

    def count(self, batches, *rest):
        calls.append(self)
        return answers(self, batches, *rest)

    monkeypatch.setattr(CudaExperts, "answers", count)
    layout = Layout(num_homes=1, num_expert_workers=2, num_copies=1, dtype="float32")
    group = TorchGroup(np.random.default_rng(1), directory, layout, lambda _: in_order)
    home, *workers = (each.network for each in group.devices)
    assert home.exchange.num_planned == 2
    assert not any(network.exchange.kept for network in (home, *workers))
    calls.clear()
    requests = [
        make_request(f"r{i}", prompt, block_size=BLOCK_SIZE, max_tokens=NUM_NEW) for i, prompt in enumerate(PROMPTS)
    ]
    found, served = serve(group, requests), list(calls)
    assert [found[f"r{i}"] for i in range(2)] == tokens_alone(directory)
    of_workers = [in_place_of(module) for network in workers for _, module in network.experts]
    assert served
    assert all(any(each is own for own in of_workers) for each in served)


class Loopback:
    """The exchange of a group of one."""

    worker, num_workers = 0, 1

    def exchange_counts(self, counts):
        return counts.clone()

    def exchange_rows(self, rows, num_sent, num_received):
        return rows.clone()


def test_engines_that_share_their_experts_get_the_same_bits(directory):
    """The rows of other engines come sorted by slot, and the home adds the answers outside of the kernel."""
    units = drive.make_units([(0, [7, 8, 9, 10, 11, 30])], np.arange(2)[None], sampling=drive.greedy(num_logprobs=5))
    results = []
    for is_spread in (False, True):
        network = whole_network(directory)
        if is_spread:
            table = scatter(np.random.default_rng(4), (network.num_layers, network.num_experts), [0], 1)
            network.keep_experts(table.logical_of[0])
            SpreadExperts(network, Loopback(), table)
        network.pack()
        assert all(in_place_of(module) is not None for _, module in network.experts)
        result = drive.run(drive.make_device(network), units)
        results.append((result.token_ids.tolist(), result.logprobs, result.expert_counts.tolist()))
    assert results[0] == results[1]


def test_a_worker_without_any_expert_has_nothing_to_exchange(directory):
    network = whole_network(directory)
    network.keep_experts(np.empty((2, 0), np.int32))
    with torch.inference_mode():
        network.pack()
    assert not network.exchange.kept
