"""Which running sequence frees its KV, to be recomputed later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moestro.core.views import BE, EvictView


@dataclass(frozen=True, slots=True)
class EvictPolicy:
    """Who yields, and to whom.

    Attributes:
        choose: (view) -> the row to evict when a running sequence finds no free block; the view is never empty.
        makes_way: whether a waiting latency-sensitive request that lacks a slot or blocks takes those of running
            best-effort sequences too; `choose` then sees only these. The order must be one that puts LS first.
        description: what it does in one line.
    """

    choose: Callable[[EvictView], int]
    makes_way: bool
    description: str


def last_in_order(view: EvictView) -> int:
    """The one that the order policy would admit last. With `fcfs` that is the latest arrival (vLLM's choice).

    The first in order is never evicted for another, so somebody always comes to an end: no livelock; and what the order
    policy does not look at (`priority` under `fcfs`) pushes nobody out.
    """
    return int(view.order_rank.argmax())


def least_computed_be_first(view: EvictView) -> int:
    """The best-effort sequence of which the least is computed, or where all are latency-sensitive the last in order.

    Best effort then loses the least that it can. Who needed the block gets it and gains a token, which no eviction
    takes back, so somebody always comes to an end.

    Source: QLLM preempts best effort for latency-sensitive jobs and keeps its KV; where KV itself is what is lacking,
    the choice is ours.
    """
    rows = np.flatnonzero(view.service_class == BE)
    if len(rows) == 0:
        return last_in_order(view)
    return int(rows[np.lexsort((-view.order_rank[rows], view.num_computed_tokens[rows]))[0]])


EvictName = Literal["last_in_order", "least_computed_be_first"]

EVICTION: dict[str, EvictPolicy] = {
    "last_in_order": EvictPolicy(
        last_in_order, makes_way=False, description="The one that the scheduling policy would admit last."
    ),
    "least_computed_be_first": EvictPolicy(
        least_computed_be_first,
        makes_way=True,
        description="Best effort, least computed first, also for a waiting latency-sensitive request (QLLM).",
    ),
}
