"""A group of workers over integers: homes and expert workers."""

from __future__ import annotations

import numpy as np
from support.fake_stages import FakeStages
from support.linked_group import LinkedGroup, Links

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.stages import StageShape
from moestro.engine.rank import Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor

NUM_EXPERTS, IS_SPARSE = 6, (True, False, True, True)
BLOCK_SIZE, BUDGET = 4, 16


class FakeGroup(LinkedGroup):
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
        counts_visits: bool = False,
    ) -> None:
        num_workers = len(table.logical_of)
        super().__init__(rng, num_homes, num_workers, repeats=repeats, losses=losses)
        self.table = table
        self.devices: list[FakeStages] = []
        slots = table.logical_of.shape[2]
        for worker in range(num_workers):
            is_home = worker < num_homes
            shape = StageShape(
                is_sparse=IS_SPARSE,
                num_experts=slots,
                num_chosen=num_chosen,
                num_rows=3 * BUDGET if is_home else 0,
                num_places=2 * BUDGET if is_home else 0,
                num_remote_places=num_credits * num_homes,
            )
            device = FakeStages(shape, 64, BLOCK_SIZE, 3 if ahead > 1 else None)
            device.num_logical, device.logical_of = table.num_experts, table.logical_of[worker]
            peers = PeerSettings(
                worker=worker,
                num_workers=num_workers,
                table=table,
                num_credits=num_credits,
                switch_gap=int(rng.integers(0, 6)),
                counts_visits=counts_visits,
            )
            links = Links(self, worker)
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
