"""Order policies that do not depend on the current time: by arrival, by priority, by deadline."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S, to_ns
from moestro.core.order_contract import OrderPolicy
from moestro.core.views import BE, WaitingView
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError


@ORDER_POLICIES.register(
    "fcfs",
    "First come, first served.",
    source="vLLM, `--scheduling-policy fcfs`",
)
class Fcfs(OrderPolicy):
    """First come, first served, by arrival at the API server. No later arrival passes a request.

    A preempted sequence keeps its arrival time, so it precedes all later arrivals.
    """

    max_passed_over_ns = 0

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by arrival."""
        return np.lexsort((view.serial, view.arrival_ns))


@ORDER_POLICIES.register(
    "priority",
    "Lowest `priority` first.",
    source="vLLM, `--scheduling-policy priority`",
)
class Priority(OrderPolicy):
    """Lowest `priority` first, then first come, first served (vLLM's `--scheduling-policy priority`).

    Bound: none. A stream of more urgent requests can pass a request for ever.
    """

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by priority, then arrival."""
        return np.lexsort((view.serial, view.arrival_ns, view.priority))

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        return {"priority": view.priority}


@ORDER_POLICIES.register(
    "edf",
    "Earliest deadline first: arrival plus the TTFT objective of the class, `ls_slo_s` or `be_slo_s`.",
    source="Liu and Layland, JACM 1973; QLLM, section 4, for 3 s",
)
class EarliestDeadline(OrderPolicy):
    """Earliest deadline first. The deadline of a request is its arrival plus the TTFT objective of its class.

    Bound: the difference of the two objectives, because a deadline never moves.

    Args:
        ls_slo_s: objective of latency-sensitive requests, seconds; 3 s in QLLM (section 4).
        be_slo_s: objective of best-effort requests, seconds. QLLM has none, and 30 s is ours.

    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973.
    """

    def __init__(self, *, ls_slo_s: float = 3.0, be_slo_s: float = 30.0) -> None:
        for name, given in (("ls_slo_s", ls_slo_s), ("be_slo_s", be_slo_s)):
            if not 0 <= given < float("inf"):
                raise ConfigError(f"{name} must be seconds, 0 or more, got {given:g}")
        self._ls_slo_ns, self._be_slo_ns = to_ns(ls_slo_s), to_ns(be_slo_s)
        self.max_passed_over_ns = abs(self._be_slo_ns - self._ls_slo_ns)

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by deadline, then arrival."""
        return np.lexsort((view.serial, view.arrival_ns, self._deadline_ns(view)))

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        return {"seconds to deadline": (self._deadline_ns(view) - now_ns) / NS_PER_S}

    def _deadline_ns(self, view: WaitingView) -> NDArray[np.int64]:
        return view.arrival_ns + np.where(view.service_class == BE, self._be_slo_ns, self._ls_slo_ns)
