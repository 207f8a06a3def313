"""A group of workers over torch devices: each has its share of a checkpoint, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from parity import tiny
from support.expert_tables import scatter
from support.linked_group import LinkedGroup, Links

from moestro.engine.rank import Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor
from moestro.model.experts.expert_open import open_expert_device
from moestro.model.network import WorkerShare
from moestro.model.staged.staged_device import open_staged_device

BLOCK_SIZE, BUDGET, MAX_LEN = 4, 24, 40


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Workers of a group. Homes come first; without expert workers, the homes hold the experts."""

    num_homes: int
    num_expert_workers: int
    num_copies: int = 0
    num_credits: int = 6
    dtype: str = "float64"

    @property
    def holders(self) -> list[int]:
        """Workers with experts."""
        first = self.num_homes if self.num_expert_workers else 0
        return list(range(first, self.num_homes + self.num_expert_workers))


class TorchGroup(LinkedGroup):
    """Workers over a checkpoint. `moods`: chances of a repeated and of a lost message."""

    def __init__(self, rng, directory: Path, layout: Layout, make_policy, moods=(0.0, 0.0)) -> None:
        num_workers = layout.num_homes + layout.num_expert_workers
        super().__init__(rng, layout.num_homes, num_workers, repeats=moods[0], losses=moods[1])
        settings = tiny.settings_of(directory, dtype=layout.dtype, num_gpu_blocks_override=64)
        placement = int(rng.integers(2**32))
        self.devices = []
        for worker in range(num_workers):
            tables = []

            def make_table(*sizes: int, tables=tables):
                seeded = np.random.default_rng(placement)
                tables.append(scatter(seeded, sizes, layout.holders, num_workers, layout.num_copies))
                return tables[0]

            num_remote_places = layout.num_credits * layout.num_homes
            share = WorkerShare(worker=worker, make_table=make_table, num_remote_places=num_remote_places)
            if worker < layout.num_homes:
                device, _ = open_staged_device(settings, BUDGET, share=share)
                device._runner._experts._piece_bytes = 1  # so that it can stop between any two experts
            else:
                device, _ = open_expert_device(settings, share)
                device._runner._piece_bytes = 1
            if tables:  # an expert worker of a dense network needs none
                self.table = tables[0]
            peers = PeerSettings(
                worker=worker,
                num_workers=num_workers,
                table=self.table,
                num_credits=layout.num_credits,
                switch_gap=int(rng.integers(0, 6)),
                dtype=layout.dtype,
            )
            executor = FlowExecutor(device, make_policy(worker), 1, peers, Links(self, worker))
            self.devices.append(device)
            self.executors.append(executor)
            if worker < layout.num_homes:
                bounds = SchedulerSettings(
                    num_blocks=64,
                    block_size=BLOCK_SIZE,
                    max_model_len=MAX_LEN,
                    max_num_seqs=6,
                    max_num_batched_tokens=BUDGET,
                )
                self.ranks.append(Rank(Scheduler(bounds, executor.recall), executor))
