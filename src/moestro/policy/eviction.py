"""Which running sequence frees its KV when blocks run out (it is recomputed later)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moestro.core.views import EvictView

# (view) -> the row to evict; the view is never empty.
EvictPolicy = Callable[[EvictView], int]


def latest_arrival(view: EvictView) -> int:
    """The least urgent, among them the one that arrived last (vLLM's choice).

    The oldest of the most urgent is never evicted for another, so somebody always comes to an end: no livelock.
    """
    return int(np.lexsort((view.serial, view.arrival_ns, view.priority))[-1])


EVICTION: dict[str, EvictPolicy] = {"latest_arrival": latest_arrival}
