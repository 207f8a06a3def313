"""Which waiting request is next: a policy answers a total order of the waiting rows.

An order states how long one request can be passed over; `tests/laws` holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import WaitingView

# (view, now_ns) -> int64[n], indices of the rows, the first to be admitted first.
OrderPolicy = Callable[[WaitingView, int], NDArray[np.int64]]


def fcfs(view: WaitingView, now_ns: int) -> NDArray[np.int64]:
    """First come, first served, by arrival at the front door. Nobody is ever passed over by a later arrival.

    A preempted sequence keeps its arrival, so it comes before everybody who arrived after it.
    """
    return np.lexsort((view.serial, view.arrival_ns))


def priority(view: WaitingView, now_ns: int) -> NDArray[np.int64]:
    """Lower `priority` first, then first come, first served (vLLM's `--scheduling-policy priority`).

    Bound: none. A stream of more urgent requests can pass one over for ever.
    """
    return np.lexsort((view.serial, view.arrival_ns, view.priority))


ORDERING: dict[str, OrderPolicy] = {"fcfs": fcfs, "priority": priority}
