"""Eviction policies: the running sequence that is preempted when KV blocks run out.

Its KV is copied to host memory or computed again later.
"""

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
    """Evicts the sequence that the order policy would admit last; under `fcfs`, the latest arrival (vLLM's choice).

    The first sequence in order is never evicted, so one sequence always ends and livelock is impossible. Fields that
    the order policy ignores, such as `priority` under `fcfs`, have no effect.
    """

    makes_way = False

    def __call__(self, view: EvictView) -> Victim:
        """Choose the last sequence in order."""
        return Victim(int(view.order_rank.argmax()))


@EVICT_POLICIES.register(
    "least_computed_be_first",
    "The best-effort sequence with the fewest computed tokens; it makes way for waiting latency-sensitive requests.",
    source="QLLM, section 3.3, which preempts best effort; the choice within best effort is ours",
)
@dataclass(frozen=True, slots=True)
class LeastComputedBeFirst:
    """Evicts the best-effort sequence with the fewest computed tokens; without best effort, the last in order.

    This choice discards the least computed work. The sequence that needed the block gains a token, which no eviction
    takes back, so one sequence always ends.

    Source: QLLM preempts best effort for latency-sensitive jobs and keeps its KV. The choice where KV blocks run out is
    ours.
    """

    makes_way = True

    def __call__(self, view: EvictView) -> Victim:
        """Choose the best-effort sequence with the fewest computed tokens."""
        rows = np.flatnonzero(view.service_class == BE)
        if len(rows) == 0:
            return LastInOrder()(view)
        return Victim(int(rows[np.lexsort((-view.order_rank[rows], view.num_computed_tokens[rows]))[0]]))
