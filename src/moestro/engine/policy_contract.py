"""Contracts of the order, batch, evict and share policies of one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.views import BatchLimits, BatchView, EvictView, ShareView, Victim, WaitingView


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request was given KV blocks for the first time (not again after a preemption)."""

    user: int  # `core.hashing.name_key`
    num_prompt_tokens: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """A request is over, whatever its end was."""

    user: int
    num_generated_tokens: int


OrderEvent = Admitted | Left


class OrderPolicy(ABC):
    """Orders the waiting requests of one engine. A policy without state changes nothing below but `order`.

    Attributes:
        max_passed_over_ns: the bound on being passed over: a request that arrives so much later than another, or more,
            never comes before it. 0: nobody is ever passed over by a later arrival. None: there is no such bound in
            time, and the policy's own words say what holds instead.
        reads_cache: whether it looks at `WaitingView.num_uncached`, which costs look-ups in the prefix cache.
        promotes_after_ns: how long after its arrival a best-effort request counts as latency-sensitive, in the order
            and for the batch and the evict policy alike.
        puts_ls_first: whether every latency-sensitive request comes before every other, so that running best-effort
            sequences may be preempted for it without coming back before it.
        observes: whether `observe` does anything.
    """

    max_passed_over_ns: int | None = None
    reads_cache: bool = False
    promotes_after_ns: int = FOREVER_NS
    puts_ls_first: bool = False
    observes: bool = False

    @abstractmethod
    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """int64[n], indices of all rows, the first to be admitted first. Changes nothing."""

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Columns by which `order` sorts before arrival, to explain it, the deciding one first; smaller is earlier."""
        return {}

    def next_change_ns(self, view: WaitingView, now_ns: int) -> int:
        """A time after `now_ns` until which `order` of these rows stays as it is, if nothing happens but time.

        From that time on it may differ. FOREVER_NS: it never will.
        """
        return FOREVER_NS

    def weight(self, user: int) -> float:
        """Weight of one user, `core.hashing.name_key` of its name; also that of a client with this name."""
        return 1.0

    def observe(self, event: OrderEvent) -> None:  # noqa: B027  most have no state
        """Take note; the only place where the policy's state changes."""


class BatchPolicy(Protocol):
    """Fills the next plan. Both answers depend on what they are given alone."""

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Tokens that newcomers might be given beside the running ones, which are the rows of `view`.

        0 or less: none can enter now, whoever it is; nobody then looks at the waiting queue.
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
