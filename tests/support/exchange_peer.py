"""A process of an exchange that ends, or stands still, in the middle."""

from __future__ import annotations

import os
import time

import torch
from torch import distributed

from moestro.model.experts.expert_slots import GroupExchange, GroupPlace


def run_peer(place: GroupPlace, path: str, is_ready, *, ends: bool) -> None:
    """Take part in one exchange over the store at `path`, and in no other. `is_ready`: set when all is imported."""
    is_ready.set()
    exchange = GroupExchange(place, distributed.FileStore(path, place.num_workers), torch.device("cpu"))
    exchange.exchange_counts(torch.zeros(place.num_workers, 1, dtype=torch.int64))
    if ends:
        os._exit(1)
    time.sleep(60)
