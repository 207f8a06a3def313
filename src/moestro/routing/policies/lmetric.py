"""LMetric: the product of tokens to prefill and batch size, with the paper's hotspot detector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.indicators import batch_size, p_tokens
from moestro.routing.policies.load import least_loaded_score
from moestro.routing.policies.peers.hotspot import HotspotDetector, HotspotSettings
from moestro.routing.policy_contract import Choice, Needs, Routed, RouteEvent, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import Scores, choose

Mitigation = Literal["off", "filter", "load"]
_DETECTOR = HotspotSettings()


def lmetric_score(view: RouteView) -> Scores:
    """Return P-token * (batch + 1): tokens to prefill on the engine times its batch, both including the request.

    Source: LMetric, Fig. 17 (b); the added 1 is the request itself, as in the authors' `lmetric.rs`.
    """
    return p_tokens(view) * (batch_size(view) + 1)


@ROUTE_POLICIES.register(
    "lmetric",
    "Multiplies the tokens to prefill and the batch, `(Q + p) * (B + 1)`, and detects hotspots of one prefix.",
    source="LMetric, sections 5 and 5.2",
)
@dataclass(kw_only=True, eq=False)
class LMetric:
    """Chooses the lowest `lmetric_score`, with a selectable response to hotspots.

    Attributes:
        hotspots: response to a hotspot. `filter` excludes its engines for its class; `load` sends the class to the
            smallest batch; `off` disables the detector.
        window_s, max_requests, min_share, max_classes: settings of the detector, as in `HotspotSettings`.
        num_alarms: numbers of alarms of the first and of the second phase.

    Source: LMetric, sections 5 and 5.2.
    """

    hotspots: Mitigation = "filter"
    window_s: float = _DETECTOR.window_s
    max_requests: int = _DETECTOR.max_requests
    min_share: float = _DETECTOR.min_share
    max_classes: int = _DETECTOR.max_classes
    num_alarms: list[int] = field(default_factory=lambda: [0, 0], init=False)
    needs = Needs(hits=True, figures=("queued_prefill_tokens",), otherwise="the router's own count of prompt tokens")

    def __post_init__(self) -> None:
        if self.hotspots not in ("off", "filter", "load"):
            raise ConfigError(f"hotspots must be off, filter or load, got {self.hotspots!r}")
        settings = HotspotSettings(
            window_s=self.window_s,
            max_requests=self.max_requests,
            min_share=self.min_share,
            max_classes=self.max_classes,
        )
        self._detector = None if self.hotspots == "off" else HotspotDetector(settings)

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest score, unless the request's class has a hotspot."""
        scores = lmetric_score(view)
        if self._detector is None:
            return choose(view, scores, draws, "P-token * batch")
        alarm = self._detector.look(view, scores)
        if not alarm.second:
            choice = choose(view, scores, draws, "P-token * batch")
        elif self.hotspots == "filter":
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
        """Update the detector's window and streaks, and count alarms."""
        if self._detector is None or not isinstance(event, Routed):
            return
        detail = event.detail
        self.num_alarms[0] += int(detail.get("first_alarm", 0))
        self.num_alarms[1] += int(detail.get("second_alarm", 0))
        self._detector.note(event, int(detail.get("class_blocks", 0)), is_lower=bool(detail.get("is_lower", 0)))
