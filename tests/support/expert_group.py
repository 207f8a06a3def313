"""Processes that spread their experts in a group and generate greedily, each under its own random schedule."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from parity import drive, tiny
from support.exchange_peer import join
from support.expert_tables import scatter
from support.loaded_processes import LOADED

from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.model.device import TorchDevice
from moestro.model.experts.exchange import GroupPlace
from moestro.model.experts.gate_override import make_override
from moestro.model.experts.spread_device import SpreadExperts
from moestro.model.network import Network

NUM_NEW = 6
PROMPTS = ([[5, 17, 4], [9] * 11], [[33, 2, 8, 61, 7, 90, 13]], [[44, 45], [46, 7, 20, 21, 22], [3]])  # by worker
_TIMEOUT_S = 60.0


class Task(NamedTuple):
    """A network that a group runs.

    Attributes:
        directory: checkpoint.
        seed: of the placement; None means an even one.
        override: of the gates.
        dtype: of the network.
    """

    directory: Path
    seed: int | None = None
    override: str | None = None
    dtype: str = "float64"


class Generated(NamedTuple):
    """What one worker generated: each sequence's tokens, and tokens by layer and expert."""

    tokens: list[list[int]]
    counts: list[list[int]]


def run_group(tasks: list[Task], num_workers: int, store: Path) -> list[list[Generated]]:
    """[task][worker]. Each worker is a process. `store`: a file that does not exist yet."""
    pipes, processes = [], []
    for worker in range(num_workers):
        parent, child = LOADED.Pipe()
        place = GroupPlace(worker=worker, num_workers=num_workers, timeout_s=_TIMEOUT_S)
        process = LOADED.Process(target=_run_worker, args=(place, str(store), tasks, child), daemon=True)
        process.start()
        child.close()  # so that a dead process ends `recv`
        pipes.append(parent)
        processes.append(process)
    try:
        by_worker = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(_TIMEOUT_S)
            process.kill()
    return [list(each) for each in zip(*by_worker, strict=True)]


def run_alone(task: Task, worker: int) -> Generated:
    """What one process with all experts generates for the prompts of a worker."""
    return _generate(_load(task), worker, np.random.default_rng(99), None)


def make_table(task: Task, network: Network, num_workers: int) -> ExpertTable:
    """The placement of a task."""
    sizes, workers = (network.num_layers, network.num_experts), list(range(num_workers))
    if task.seed is None:
        return spread_evenly(*sizes, workers, num_workers)
    return scatter(np.random.default_rng(task.seed), sizes, workers, num_workers, num_copies=2)


def _load(task: Task) -> Network:
    network = tiny.load(task.directory, dtype=task.dtype)
    num_chosen = network.probe(drive.BLOCK_SIZE)[1]
    if task.override is not None:
        network.override = make_override(task.override, network.gate_shape(num_chosen), 3)
    return network


def _run_worker(place: GroupPlace, store: str, tasks: list[Task], pipe) -> None:
    gc.freeze()  # each network that is cut collects garbage, also among the libraries' objects
    torch.set_num_threads(1)
    exchange, sockets = join(place, store)
    done = []
    for number, task in enumerate(tasks):
        network = _load(task)
        probe = network.probe(drive.BLOCK_SIZE)[0]
        table = make_table(task, network, place.num_workers)
        network.keep_experts(table.logical_of[place.worker])
        network.pack()
        spread = SpreadExperts(network, exchange, table)
        rng = np.random.default_rng((number, place.worker))
        done.append(_generate(network, place.worker, rng, (exchange, spread, probe)))
    sockets.close()
    pipe.send(done)


def _generate(network: Network, worker: int, rng: np.random.Generator, group) -> Generated:
    """Greedy tokens of the worker's prompts; in a group, steps without tokens come between the others."""
    exchange, spread, probe = group or (None, None, network.probe(drive.BLOCK_SIZE)[0])
    device = TorchDevice(drive.recording(network), probe.allocate(drive.NUM_BLOCKS))
    sequences = drive.admit(PROMPTS[worker], NUM_NEW, rng)
    while True:
        going = [each for each in sequences if len(each.tokens) < each.num_prompt + NUM_NEW]
        chosen = [going[i] for i in rng.permutation(len(going))[: rng.integers(0, len(going) + 1)]]
        if exchange is not None:
            gathered = exchange.gather(np.array([len(chosen), len(going)]))
            if not gathered[:, 1].any():
                break
            if not gathered[:, 0].any():
                continue
        elif not going:
            break
        if chosen:
            drive.step(device, chosen, rng)
        elif spread is not None:
            spread.take_part()
    return Generated([each.tokens for each in sequences], network.total_counts.tolist())
