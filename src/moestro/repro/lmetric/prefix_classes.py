"""The heat of prompt classes against the number of engines that hold their prefix (LMetric, section 5.2, Fig. 20)."""

from __future__ import annotations

import numpy as np

from moestro.repro.lmetric.watching import Watching
from moestro.routing.policy_contract import Routed, RouteEvent, RoutePolicy


class WatchedClasses(Watching):
    """Notes the figures of LMetric's detector for each request whose class it tracks.

    Args:
        policy: LMetric with its detector.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        super().__init__(policy)
        self._shares: list[tuple[float, float]] = []

    def observe(self, event: RouteEvent) -> None:
        """Note the class's share of requests and of engines, unless no engine has its blocks."""
        super().observe(event)
        if isinstance(event, Routed) and event.detail.get("holder_share"):
            self._shares.append((event.detail["class_share"], event.detail["holder_share"]))

    def sample(self, num_points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Class shares and holder shares, sampled evenly from the whole run, at most `num_points`."""
        at = np.linspace(0, len(self._shares) - 1, min(num_points, len(self._shares))).astype(int)
        chosen = [self._shares[i] for i in at]
        return tuple(x for x, _ in chosen), tuple(m for _, m in chosen)
