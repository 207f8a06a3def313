"""Contract of order policies: the order of waiting requests, in an engine's queue and in a router's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.views import WaitingView


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A request left its queue for the first time: an engine gave it KV blocks, or a router sent it to an engine."""

    user: int  # `core.hashing.name_key`
    num_prompt_tokens: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """A request is over, whatever its end was."""

    user: int
    num_generated_tokens: int


OrderEvent = Admitted | Left


class OrderPolicy(ABC):
    """Orders the waiting requests of one queue. A policy without state changes nothing below but `order`.

    Attributes:
        max_passed_over_ns: the bound on being passed over: a request that arrives so much later than another, or more,
            never comes before it. 0: no later arrival passes a request. None: there is no such bound in
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
