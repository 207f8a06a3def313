"""LMetric: the product of what there is to prefill and of the batch, with its detector of hotspots."""

from __future__ import annotations

from typing import Literal

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.policy.routing.contract import Choice, Needs, Routed, RouteEvent, RouteView
from moestro.policy.routing.hotspot import HotspotDetector, HotspotSettings
from moestro.policy.routing.indicators import batch_size, p_tokens
from moestro.policy.routing.load import least_loaded_score
from moestro.policy.routing.scoring import Scores, choose

Mitigation = Literal["off", "filter", "load"]


def lmetric_score(view: RouteView) -> Scores:
    """P-token * (batch + 1): all tokens to prefill if the request went there, times the batch that it would make.

    Source: LMetric, Fig. 17 (b); the one is the request itself, as in the authors' `lmetric.rs`.
    """
    return p_tokens(view) * (batch_size(view) + 1)


class LMetric:
    """The lowest `lmetric_score`; what is done about a hotspot is chosen.

    Args:
        hotspots: `filter` leaves the hotspot's engines out for its class; `load` sends the class to the smallest batch;
            `off` does nothing, and keeps no window.
        detector: what it looks at.

    Attributes:
        num_alarms: of the first phase, and of the second.

    Source: LMetric, sections 5 and 5.2.
    """

    needs = Needs(hits=True, figures=("queued_prefill_tokens",), otherwise="the router's own count of prompt tokens")

    def __init__(self, *, hotspots: Mitigation = "filter", detector: HotspotSettings | None = None) -> None:
        if hotspots not in ("off", "filter", "load"):
            raise ConfigError(f"hotspots must be off, filter or load, got {hotspots!r}")
        self._mitigation = hotspots
        self._detector = None if hotspots == "off" else HotspotDetector(detector or HotspotSettings())
        self.num_alarms = [0, 0]

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The lowest score, unless its class has a hotspot."""
        scores = lmetric_score(view)
        if self._detector is None:
            return choose(view, scores, draws, "P-token * batch")
        alarm = self._detector.look(view, scores)
        if not alarm.second:
            choice = choose(view, scores, draws, "P-token * batch")
        elif self._mitigation == "filter":
            choice = choose(view, scores, draws, "hotspot left out; P-token * batch", ~alarm.holders)
        else:
            choice = choose(view, least_loaded_score(view), draws, "hotspot; smallest batch")
        if not alarm.num_blocks:
            return choice
        detail = {
            "class_blocks": alarm.num_blocks,
            "first_alarm": alarm.first,
            "is_lower": alarm.is_lower,
            "second_alarm": alarm.second,
            "class_share": alarm.class_share,
            "holder_share": alarm.holder_share,
        }
        return Choice(choice.engine, choice.score, choice.reason, choice.scores, detail)

    def observe(self, event: RouteEvent) -> None:
        """Keep the window, the streaks and the counts."""
        if self._detector is None or not isinstance(event, Routed):
            return
        detail = event.detail
        self.num_alarms[0] += int(detail.get("first_alarm", 0))
        self.num_alarms[1] += int(detail.get("second_alarm", 0))
        self._detector.note(event, int(detail.get("class_blocks", 0)), is_lower=bool(detail.get("is_lower", 0)))
