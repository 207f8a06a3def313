"""Which running sequence frees its KV when blocks run out (it is recomputed later)."""

from __future__ import annotations

from collections.abc import Callable

from moestro.core.views import EvictView

# (view) -> the row to evict; the view is never empty.
EvictPolicy = Callable[[EvictView], int]


def last_in_order(view: EvictView) -> int:
    """The one that the order policy would admit last. With `fcfs` that is the latest arrival (vLLM's choice).

    The first in order is never evicted for another, so somebody always comes to an end: no livelock; and what the order
    policy does not look at (`priority` under `fcfs`) pushes nobody out.
    """
    return int(view.order_rank.argmax())


EVICTION: dict[str, EvictPolicy] = {"last_in_order": last_in_order}
