"""Choice of the running sequence that frees its KV, to be copied back from host memory or computed again later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.views import BE, EvictView, Victim
from moestro.engine.registry import EVICT_POLICIES


@EVICT_POLICIES.register(
    "last_in_order",
    "The sequence that the scheduling policy would admit last.",
    source="vLLM v1, which preempts the latest arrival",
)
@dataclass(frozen=True, slots=True)
class LastInOrder:
    """The sequence that the order policy would admit last. With `fcfs` that is the latest arrival (vLLM's choice).

    The first in order is never evicted for another, so one sequence always ends and there is no livelock. What the
    order policy does not look at (`priority` under `fcfs`) evicts no sequence.
    """

    makes_way = False

    def __call__(self, view: EvictView) -> Victim:
        """The last in order."""
        return Victim(int(view.order_rank.argmax()))


@EVICT_POLICIES.register(
    "least_computed_be_first",
    "Best effort, least computed first; it also makes way for waiting latency-sensitive requests.",
    source="QLLM, section 3.3, which preempts best effort; the choice among it is ours",
)
@dataclass(frozen=True, slots=True)
class LeastComputedBeFirst:
    """The best-effort sequence of which the least is computed; where all are latency-sensitive, the last in order.

    Best effort then loses as little as possible. The sequence that needed the block gets it and gains a token, which no
    eviction takes back, so one sequence always ends.

    Source: QLLM preempts best effort for latency-sensitive jobs and keeps its KV. Where KV itself is scarce, the choice
    is ours.
    """

    makes_way = True

    def __call__(self, view: EvictView) -> Victim:
        """The least computed of best effort."""
        rows = np.flatnonzero(view.service_class == BE)
        if len(rows) == 0:
            return LastInOrder()(view)
        return Victim(int(rows[np.lexsort((-view.order_rank[rows], view.num_computed_tokens[rows]))[0]]))
