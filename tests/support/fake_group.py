"""A group of workers over integers: homes and expert workers that exchange messages over links with moods.

A link keeps the order of its messages. It may repeat one, or lose one; a loss is noticed later, as a timeout would.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from support.fake_stages import FakeStages

from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.core.hops import DISPATCH
from moestro.core.stages import StageShape
from moestro.engine.rank import Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor

NUM_EXPERTS, IS_SPARSE = 6, (True, False, True, True)
BLOCK_SIZE, BUDGET = 4, 16


class FakeLinks:
    """The links from one worker to all others."""

    def __init__(self, group: FakeGroup, worker: int) -> None:
        self.group, self.worker = group, worker

    def send(self, message, now_ns: int) -> None:
        assert message.hop.src == self.worker != message.hop.dst
        assert len(message.tensor) == message.hop.num_rows
        self.group.channels[self.worker, message.hop.dst].append(message)
        self.group.num_messages += 1


class FakeGroup:
    """Workers 0 to num_homes - 1 are homes; those that `table` gives slots compute experts.

    Args:
        repeats, losses: chance that a delivery is repeated, and that a message is lost.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        num_homes: int,
        table: ExpertTable,
        make_policy,
        *,
        num_credits: int = 8,
        num_chosen: int = 3,
        repeats: float = 0.0,
        losses: float = 0.0,
        ahead: int = 1,
    ) -> None:
        self.rng, self.num_homes, self.table, self.repeats, self.losses = rng, num_homes, table, repeats, losses
        num_workers = len(table.logical_of)
        self.channels: dict = {(a, b): deque() for a in range(num_workers) for b in range(num_workers) if a != b}
        self.lost: list[tuple[int, int]] = []  # (home, worker) of messages that were lost and not missed yet
        self.num_messages = 0
        self.executors: list[FlowExecutor] = []
        self.devices: list[FakeStages] = []
        self.ranks: list[Rank] = []
        slots = table.logical_of.shape[2]
        for worker in range(num_workers):
            is_home = worker < num_homes
            shape = StageShape(
                is_sparse=IS_SPARSE,
                num_experts=slots,
                num_chosen=num_chosen,
                num_rows=3 * BUDGET if is_home else 0,
                num_places=2 * BUDGET if is_home else 0,
                num_guests=num_credits * num_homes,
            )
            device = FakeStages(shape, 64, BLOCK_SIZE, 3 if ahead > 1 else None)
            device.num_logical, device.logical_of = table.num_experts, table.logical_of[worker]
            peers = PeerSettings(
                worker=worker,
                num_workers=num_workers,
                table=table,
                num_credits=num_credits,
                switch_gap=int(rng.integers(0, 6)),
            )
            links = FakeLinks(self, worker)
            executor = FlowExecutor(device, make_policy(worker), ahead, peers, links)
            self.devices.append(device)
            self.executors.append(executor)
            if is_home:
                settings = SchedulerSettings(
                    num_blocks=64,
                    block_size=BLOCK_SIZE,
                    max_model_len=32,
                    max_num_seqs=6,
                    max_num_batched_tokens=BUDGET,
                )
                self.ranks.append(Rank(Scheduler(settings, executor.recall), executor))

    def turn(self, now_ns: int) -> list:
        """One worker, at random, does a piece of work, or one message arrives; (home, output) of what was gained."""
        gained = []
        worker = int(self.rng.integers(len(self.executors)))
        if worker < self.num_homes:
            gained += [(worker, output) for output in self.ranks[worker].step(now_ns, lambda: True)]
        else:
            self.executors[worker].start(now_ns)
            assert self.executors[worker].poll(now_ns, lambda: True) is None
        for _ in range(int(self.rng.integers(0, 4))):
            self._deliver(now_ns)
        if self.lost and self.rng.random() < 0.1:
            home, peer = self.lost.pop(0)
            self.executors[home].lose(peer, now_ns)
        return gained

    def _deliver(self, now_ns: int) -> None:
        waiting = [channel for channel, messages in self.channels.items() if messages]
        if not waiting:
            return
        src, dst = waiting[self.rng.integers(len(waiting))]
        message = self.channels[src, dst].popleft()
        if self.rng.random() < self.losses:
            self.lost.append((src, dst) if message.hop.kind == DISPATCH else (dst, src))
            return
        for _ in range(1 + (self.rng.random() < self.repeats)):
            self.executors[dst].receive(message, now_ns)

    @property
    def is_idle(self) -> bool:
        return not any(self.channels.values()) and not self.lost and not any(rank.has_work for rank in self.ranks)

    def check_empty(self) -> None:
        """Nothing is left when all requests have ended."""
        for executor in self.executors:
            core = executor._core
            assert core.num_plans == core.num_launched == core._queues.num_waiting == 0
            assert core._pool.num_free_rows == core.shape.num_rows, "a row leaked"
            assert core._pool.num_free_places == core.shape.num_places, "a place leaked"
            assert core._guests.num_free == core.shape.num_guests, "a guest leaked"


def random_table(rng: np.random.Generator, num_workers: int, holders: list[int], num_copies: int) -> ExpertTable:
    """Every expert on one of `holders`, another one in each layer, and `num_copies` more copies."""
    placed: list[list[list[int]]] = [[[] for _ in IS_SPARSE] for _ in range(num_workers)]
    for layer in range(len(IS_SPARSE)):
        for expert in range(NUM_EXPERTS):
            placed[int(rng.choice(holders))][layer].append(expert)
        for _ in range(num_copies):
            expert, worker = int(rng.integers(NUM_EXPERTS)), int(rng.choice(holders))
            if expert not in placed[worker][layer]:
                placed[worker][layer].append(expert)
    width = max(len(slots) for by_layer in placed for slots in by_layer)
    logical_of = np.full((num_workers, len(IS_SPARSE), width), EMPTY, np.int32)
    for worker, by_layer in enumerate(placed):
        for layer, slots in enumerate(by_layer):
            logical_of[worker, layer, : len(slots)] = rng.permutation(slots)
    return ExpertTable(0, logical_of, NUM_EXPERTS, np.ones(num_workers, np.bool_))
