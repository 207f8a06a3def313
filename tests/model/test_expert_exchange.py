"""The exchange between processes: what happens when one of them ends or stands still."""

from __future__ import annotations

import pytest
import torch
from support.exchange_peer import run_peer
from support.loaded_processes import LOADED
from torch import distributed

from moestro.errors import GroupLostError
from moestro.model.experts.expert_slots import GroupExchange, GroupPlace

_COUNTS = torch.zeros(2, 1, dtype=torch.int64)


def place(worker: int, timeout_s: float) -> GroupPlace:
    return GroupPlace(worker=worker, num_workers=2, timeout_s=timeout_s)


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_worker_is_an_error_and_not_a_hang(ends, tmp_path):
    """An ended process is noticed at once, one that stands still after the time that was given."""
    is_ready = LOADED.Event()
    path = str(tmp_path / "store")
    arguments = (place(1, 30.0), path, is_ready)
    peer = LOADED.Process(target=run_peer, args=arguments, kwargs={"ends": ends}, daemon=True)
    peer.start()
    assert is_ready.wait(300)
    exchange = GroupExchange(place(0, 3600.0 if ends else 5.0), distributed.FileStore(path, 2), torch.device("cpu"))
    try:
        exchange.exchange_counts(_COUNTS)
        with pytest.raises(GroupLostError):
            exchange.exchange_counts(_COUNTS)
    finally:
        peer.kill()
        distributed.destroy_process_group()
