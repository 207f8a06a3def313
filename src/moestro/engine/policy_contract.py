"""Contracts of the batch, evict and share policies of one engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import BatchLimits, BatchView, EvictView, ShareView, Victim


class BatchPolicy(Protocol):
    """Fills the next plan. Both answers depend on what they are given alone."""

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Tokens that newcomers might be given beside the running ones, which are the rows of `view`.

        0 or less: no request can enter now, and the scheduler does not read the waiting queue.
        """
        ...

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """int32[n], tokens of each row in the next plan; 0: not in it.

        At most `num_left` each and the budget in all; at least one row gets something if there is any.
        """
        ...


class EvictPolicy(Protocol):
    """Chooses the running sequence that frees its KV when another finds no free block."""

    @property
    def makes_way(self) -> bool:
        """Whether a waiting latency-sensitive request that lacks a slot or blocks takes those of running best-effort
        sequences too. The view then has only these, and the order must put latency-sensitive requests first.
        """
        ...

    def __call__(self, view: EvictView) -> Victim:
        """The sequence to evict. The view is never empty."""
        ...


class SharePolicy(Protocol):
    """Divides an engine between clients whose sequences find no place, or more tokens to compute than a step has."""

    def __call__(self, view: ShareView) -> NDArray[np.float64]:
        """float64[n], part of the engine, above 0 and at most 1, that each client may claim before others have more."""
        ...
