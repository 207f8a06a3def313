"""A process of an exchange that ends, or stands still, in the middle."""

from __future__ import annotations

import os
import time

import torch

from moestro.model.expert_exchange import GroupAddress, GroupExchange


def run_peer(address: GroupAddress, is_ready, *, ends: bool) -> None:
    """Take part in one exchange, and then in no other. `is_ready`: an event, set when all is imported."""
    is_ready.set()
    exchange = GroupExchange(address, torch.device("cpu"))
    exchange.exchange_counts(torch.zeros(address.num_workers, 1, dtype=torch.int64))
    if ends:
        os._exit(1)
    time.sleep(60)
