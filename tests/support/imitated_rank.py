"""A worker of `moestro serve` with a network on an imitated accelerator, among as many as the environment says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import imitated_accelerator, imitated_nccl

from moestro.worker.network_rank import build_network_rank, load_network_part
from moestro.worker.rank_process import leave, run_process

NUM_CARDS = "IMITATED_CARDS"  # variable of the environment


def _main() -> int:
    monkeypatch = pytest.MonkeyPatch()
    num_cards = int(os.environ[NUM_CARDS])
    with imitated_accelerator.imitated(monkeypatch, num_cards):
        if num_cards > 1:
            imitated_nccl.imitate(monkeypatch)
        return run_process(build_network_rank, load_network_part)


if __name__ == "__main__":
    leave(_main())
