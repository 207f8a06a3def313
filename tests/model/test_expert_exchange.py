"""The exchange between processes: what happens when one of them ends or stands still."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
from support.exchange_peer import run_peer

from moestro.model.expert_exchange import GroupAddress, GroupExchange

_COUNTS = torch.zeros(2, 1, dtype=torch.int64)


def address(tmp_path, worker: int, timeout_s: float) -> GroupAddress:
    return GroupAddress(url=f"file://{tmp_path}/store", worker=worker, num_workers=2, timeout_s=timeout_s)


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_worker_is_an_error_and_not_a_hang(ends, tmp_path):
    """An ended process is noticed at once, one that stands still after the time that was given."""
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    arguments = (address(tmp_path, 1, 30.0), is_ready)
    peer = context.Process(target=run_peer, args=arguments, kwargs={"ends": ends}, daemon=True)
    peer.start()
    assert is_ready.wait(60)
    exchange = GroupExchange(address(tmp_path, 0, 30.0 if ends else 5.0), torch.device("cpu"))
    try:
        exchange.exchange_counts(_COUNTS)
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            exchange.exchange_counts(_COUNTS)
        assert time.monotonic() - begin < 25
    finally:
        peer.kill()
        exchange.leave()
