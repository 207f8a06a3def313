"""Processes of an exchange: how one joins it, and one that ends, or stands still, in the middle."""

from __future__ import annotations

import os
import time

import torch
from torch import distributed

from moestro.model.experts.exchange import GroupExchange, GroupPlace, Meeting
from moestro.wire.sockets import SocketExchange


def join(place: GroupPlace, path: str) -> tuple[GroupExchange, SocketExchange]:
    """Join a group on CPUs over the store at `path`; return its exchange, and the sockets that carry it."""
    store = distributed.FileStore(path, place.num_workers)
    host = SocketExchange(place.worker, place.num_workers, place.timeout_s, store)
    return GroupExchange(place, Meeting(store, host), torch.device("cpu")), host


def run_peer(place: GroupPlace, path: str, is_ready, *, ends: bool) -> None:
    """Take part in one exchange over the store at `path`, and in no other. `is_ready`: set when all is imported."""
    is_ready.set()
    exchange, _ = join(place, path)
    exchange.exchange_counts(torch.zeros(place.num_workers, 1, dtype=torch.int64))
    if ends:
        os._exit(1)
    time.sleep(60)
