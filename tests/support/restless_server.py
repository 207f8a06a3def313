"""`moestro serve --mode ep` whose experts never rest: the next migration, to and fro, begins when one has ended."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.moving_tables import random_target
from support.replaced import replace_names

from moestro.cli import main
from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.live.ep_migration import EpMigration
from moestro.server.processes import cluster
from moestro.wire.messages import FromRank

MAX_BYTES_PER_STEP = 1  # one expert, so that a layer takes several steps


class RestlessMigration(EpMigration):
    """Moves experts to a random placement, back to the first one, to the next random one, and so on."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._rng = np.random.default_rng(7)
        self._first: ExpertTable | None = None

    def on_message(self, rank: int, message: FromRank) -> None:
        super().on_message(rank, message)
        if self._table is None or self.progress.is_running:
            return
        self._first = self._first or self.table
        is_first = (self.table.logical_of == self._first.logical_of).all()
        with contextlib.suppress(ValueError):  # the engines are not ready
            self.start(random_target(self._rng, self.table) if is_first else self._first, MAX_BYTES_PER_STEP)


if __name__ == "__main__":
    replace_names(cluster, EpMigration=RestlessMigration)
    main(sys.argv[1:])
