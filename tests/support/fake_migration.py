"""A migration that moves when a test says so, and fake reports of engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moestro.core.experts.expert_load import SourceLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.live.ep_migration import MigrationProgress
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.wire.messages import ReadExperts, report_of


class FakeMigration:
    """Implements `placement.live.migration.Migration`: each `commit` serves another layer by the new table."""

    def __init__(self, table: ExpertTable) -> None:
        self.table = table
        self.progress = MigrationProgress()
        self.target: ExpertTable | None = None
        self.layers: list[int] = []
        self.num_started = self.num_cancelled = 0
        self.max_bytes_per_step = 0

    def start(self, target: ExpertTable, max_bytes_per_step: int) -> None:
        if self.progress.is_running:
            raise ValueError("a migration is running")
        assert target.logical_of.shape == self.table.logical_of.shape
        differs = (target.logical_of != self.table.logical_of) | (target.slot_parts != self.table.slot_parts)
        self.layers = np.flatnonzero(differs.any(axis=(0, 2))).tolist()
        self.target, self.max_bytes_per_step = target, max_bytes_per_step
        self.num_started += 1
        self.progress = MigrationProgress(num_layers=len(self.layers), is_running=True)

    def cancel(self) -> None:
        self.num_cancelled += 1
        self.progress = replace(self.progress, is_running=False, error="cancelled")

    def commit(self, num_bytes: int = 1000) -> None:
        """Serve the next layer by the new table; after the last one the migration ends."""
        layer = self.layers.pop(0)
        logical_of, parts = self.table.logical_of.copy(), self.table.slot_parts
        logical_of[:, layer] = self.target.logical_of[:, layer]
        parts[:, layer] = self.target.slot_parts[:, layer]
        version = self.table.version + 1
        self.table = replace(self.table, version=version, logical_of=logical_of, shares=parts)
        progress = self.progress
        self.progress = replace(
            progress,
            num_committed=progress.num_committed + 1,
            num_bytes=progress.num_bytes + num_bytes,
            is_running=bool(self.layers),
        )

    def commit_all(self) -> None:
        while self.progress.is_running:
            self.commit()

    def fail(self, error: str) -> None:
        self.progress = replace(self.progress, is_running=False, error=error)


class FakeEngines:
    """Engines that answer at once with the load that a test sets.

    Args:
        tokens: Tokens per step, [engines][layers][experts].
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.num_steps = 0
        self.questions: list[ReadExperts] = []
        self.loads = ExpertLoads(len(tokens), self._ask)

    def _ask(self, engine: int, question: ReadExperts) -> bool:
        self.questions.append(question)
        if not self.num_steps:
            return False
        mean = np.array(self.tokens[engine], float)
        counts = np.ceil(mean).astype(np.int64)
        load = SourceLoad(counts, mean, np.zeros(mean.shape), np.minimum(mean, 1.0), self.num_steps, self.num_steps)
        self.loads.on_message(engine, report_of(question.number, load), 0)
        return False  # no caller has to wait
