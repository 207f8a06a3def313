"""What policies look at: frozen tables, one NumPy column per figure. A view never changes while a policy holds it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LS, BE = 0, 1  # `ServiceClass` as the views' columns have it


@dataclass(frozen=True, slots=True, eq=False)
class EngineTable:
    """Engines as a router knows them, one row each.

    Attributes:
        routable: bool[n], ready and not draining.
        num_in_flight: int32[n], requests sent and not ended: the router's own count, exact, age zero.
    """

    routable: NDArray[np.bool_]
    num_in_flight: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingView:
    """Requests of one engine to be ordered, one row each: those that wait, or (for eviction) those that run.

    Attributes:
        arrival_ns: int64[n].
        num_prompt_tokens: int32[n].
        priority: int32[n], lower is earlier.
        serial: int64[n], unique, in order of `Rank.add`: the last key of a total order.
        service_class: uint8[n], LS or BE, as the client said it.
        user: int64[n], `core.hashing.name_key` of the user.
        num_uncached: int32[n], tokens that would have to be computed if it entered now, after the cached prefix; all
            known tokens where nobody looked, which is beyond the oldest `MAX_LOOKED_UP` rows. None: the policy does not
            ask (`OrderPolicy.reads_cache`).
    """

    arrival_ns: NDArray[np.int64]
    num_prompt_tokens: NDArray[np.int32]
    priority: NDArray[np.int32]
    serial: NDArray[np.int64]
    service_class: NDArray[np.uint8]
    user: NDArray[np.int64]
    num_uncached: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchView:
    """Sequences that may enter the next plan: the running ones in order of admission, then the next to be admitted.

    Attributes:
        num_left: int32[n], tokens to compute before the next token is sampled (decode: 1).
        is_decode: bool[n], one token is left (a prompt's last token on its own counts too: it costs the same), and it
            is admitted.
        is_waiting: bool[n], not admitted yet.
        service_class: uint8[n], LS or BE; LS too if the order policy has promoted it (`OrderPolicy.promotes_after_ns`).
        num_in_flight: running sequences that are not here, for they have a unit in flight.
    """

    num_left: NDArray[np.int32]
    is_decode: NDArray[np.bool_]
    is_waiting: NDArray[np.bool_]
    service_class: NDArray[np.uint8]
    num_in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one plan: tokens in all, and tokens of one prefill chunk."""

    token_budget: int
    max_chunk: int


@dataclass(frozen=True, slots=True, eq=False)
class EvictView:
    """Running sequences whose KV could be freed now (none has a unit in flight), one row each.

    Attributes:
        order_rank: int64[n], place in the order policy's order; 0 would be admitted first.
        num_computed_tokens: int32[n], what recomputing would cost.
        service_class: uint8[n], as in `BatchView`.
    """

    order_rank: NDArray[np.int64]
    num_computed_tokens: NDArray[np.int32]
    service_class: NDArray[np.uint8]
