"""LMetric: the product of tokens to prefill and batch size, with the paper's two-phase detector of KV hotspots.

A request's class is the deepest block of its prompt that at least `min_share` of the window's requests share. M is the
set of engines that hold the class's block; x is the class's share of the window.

First phase (equations 2 and 3): x / (1 - x) > |M| / (number of other engines). If M got the whole class, its batches
would outgrow the others'. A prefix that all engines hold raises no alarm, however popular it is. Second phase (equation
4): more than 2 |M| consecutive requests of the class scored lower on M than elsewhere, so the growing batch does not
push them away. Then M is a hotspot for this class.

Source: LMetric, section 5.2.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from moestro.core.hashing import HASH_BYTES, BlockRun, PrefixTree
from moestro.core.rng import Draws
from moestro.core.views import all_true
from moestro.errors import ConfigError
from moestro.routing.kernel.passes import route_kernel
from moestro.routing.policies.load import least_loaded_score
from moestro.routing.policy_contract import Choice, Needs, Routed, RouteEvent, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import ONE, Counts, Mask, Scores, batch_size, choose, p_tokens

_ALL = 0  # the only holder in the window's tree


@dataclass(frozen=True, slots=True, kw_only=True)
class HotspotSettings:
    """Settings of the hotspot detector.

    Attributes:
        window_s: length of the window, seconds; one minute in the paper.
        max_requests: limit of requests in the window, which bounds its memory; the newest are kept.
        min_share: least share of a class of the window's requests, 0 .. 1.
        max_classes: limit of tracked classes; those whose hits save the most blocks are kept.
    """

    window_s: float = 60.0
    max_requests: int = 2048
    min_share: float = 0.01
    max_classes: int = 16

    def __post_init__(self) -> None:
        if not (self.window_s > 0 and self.max_requests > 0 and self.max_classes > 0):
            raise ConfigError("window_s, max_requests and max_classes must be above 0")
        if not 0 < self.min_share <= 1:
            raise ConfigError(f"min_share must be above 0 and at most 1, got {self.min_share:g}")


class PrefixClass(NamedTuple):
    """A class of requests: the shared block, the number of blocks up to it, and its requests in the window."""

    block: bytes
    num_blocks: int
    num_requests: int


class Alarm(NamedTuple):
    """The detector's verdict on one request.

    Attributes:
        num_blocks: blocks that the class shares; 0 means no tracked class.
        holders: bool[n], M, the routable engines that hold these blocks. None without an alarm of the first phase.
        first: whether the first phase raises an alarm.
        is_lower: whether the lowest score on M is below the lowest elsewhere.
        second: whether the second phase raises an alarm.
        class_share: x, the class's share of the window's requests.
        holder_share: share of M among the routable engines. The first phase raises an alarm if it is below x and
            neither 0 nor 1.
    """

    num_blocks: int
    holders: Mask | None = None
    first: bool = False
    is_lower: bool = False
    second: bool = False
    class_share: float = 0.0
    holder_share: float = 0.0

    def detail(self) -> dict[str, float]:
        """Return the figures for the record of the decision; none without a tracked class."""
        if not self.num_blocks:
            return {}
        return {
            "class_blocks": self.num_blocks,
            "first_alarm": self.first,
            "is_lower": self.is_lower,
            "second_alarm": self.second,
            "class_share": self.class_share,
            "holder_share": self.holder_share,
        }


class _Tracked:
    """A tracked class: the run that ends with its block, and the number of consecutive lower scores on M."""

    __slots__ = ("run", "streak")

    def __init__(self, run: BlockRun) -> None:
        self.run = run
        self.streak = 0

    def saved(self) -> int:
        """Return the number of blocks that hits of this class can save in one window."""
        return self.run.counts.get(_ALL, 0) * self.run.depth


class HotspotDetector:
    """Detects hotspots in a window of requests; `look` precedes each decision and `note` follows it."""

    def __init__(self, settings: HotspotSettings) -> None:
        self._settings = settings
        self._window_ns = int(settings.window_s * 1e9)
        self._tree = PrefixTree()  # prompts of the window
        self._window: deque[tuple[int, BlockRun | None]] = deque()
        self._tracked: dict[bytes, _Tracked] = {}  # by the class's block

    def look(self, view: RouteView, scores: Scores | Counts) -> Alarm:
        """Return the verdict on a request, given the scores of the product, [n]."""
        routable = view.engines.routable
        own = self.class_of(view.request.block_hashes)
        if own is None or own.block not in self._tracked:
            return Alarm(0)
        num_shared = own.num_blocks * view.block_size
        num_holders, num_others = _count_holders(view, num_shared)
        outside = len(self._window) - own.num_requests
        # x / (1 - x) > |M| / |others|, without a division by 0.
        first = num_holders > 0 and num_others > 0 and own.num_requests * num_others > num_holders * outside
        holders = routable & (view.hit_tokens >= num_shared) if first else None
        is_lower = holders is not None and _is_lower_on(holders, scores, view, num_shared)
        second = is_lower and self._tracked[own.block].streak + 1 > 2 * num_holders
        class_share = own.num_requests / len(self._window)
        return Alarm(
            own.num_blocks, holders, first, is_lower, second, class_share, num_holders / (num_holders + num_others)
        )

    def note(self, event: Routed, alarm_blocks: int, *, is_lower: bool) -> None:
        """Record a routed request with the `num_blocks` and `is_lower` of its alarm."""
        hashes = event.request.block_hashes
        if alarm_blocks:
            tracked = self._tracked[_block(hashes, alarm_blocks)]
            tracked.streak = tracked.streak + 1 if is_lower else 0
        self._slide(event.now_ns)
        last = self._tree.add(_ALL, hashes)
        self._window.append((event.now_ns, last))
        if last is not None:
            self._track(last, hashes)

    def class_of(self, hashes: bytes) -> PrefixClass | None:
        """Return the class of a prompt in the current window, or None without a class."""
        last, num_blocks = self._tree.find(hashes)
        run = self._shared(last)
        if run is None:
            return None
        num_blocks = min(run.depth, num_blocks)
        return PrefixClass(_block(hashes, num_blocks), num_blocks, run.counts[_ALL])

    def _shared(self, run: BlockRun | None) -> BlockRun | None:
        """Return the last run up to `run` that enough of the window's requests share; None if there is none."""
        least = max(2, self._settings.min_share * len(self._window))
        while run is not None and run.counts[_ALL] < least:
            run = run.parent
        return run

    @property
    def num_tracked(self) -> int:
        """Number of tracked classes."""
        return len(self._tracked)

    def _track(self, last: BlockRun, hashes: bytes) -> None:
        """Track the class of a prompt if there is room, or if it saves more blocks than the least tracked class."""
        run = self._shared(last)
        if run is None:
            return
        block, tracked = _block(hashes, run.depth), self._tracked
        if block in tracked:
            tracked[block].run = run  # a new run, if the class had left the window and returned
            return
        if len(tracked) == self._settings.max_classes:
            least = min(tracked, key=lambda each: tracked[each].saved())
            if tracked[least].saved() >= run.counts[_ALL] * run.depth:
                return
            del tracked[least]
        tracked[block] = _Tracked(run)

    def _slide(self, now_ns: int) -> None:
        """Drop requests that are too old, and make room for one more request."""
        window = self._window
        while window and (window[0][0] < now_ns - self._window_ns or len(window) >= self._settings.max_requests):
            last = window.popleft()[1]
            if last is not None:
                self._tree.drop(_ALL, last)


def _count_holders(view: RouteView, num_tokens: int) -> tuple[int, int]:
    """Return how many routable engines have so many tokens of the prompt in their caches, and how many have not."""
    if (kernel := route_kernel.look()) is not None:
        found = kernel.holders(view.engines, view.hit_tokens, num_tokens)
        if found is not None:
            return found
    routable, has = view.engines.routable, view.hit_tokens >= num_tokens
    if all_true(routable):
        num = int(np.count_nonzero(has))
        return num, len(has) - num
    num = int(np.count_nonzero(routable & has))
    return num, int(np.count_nonzero(routable)) - num


def _is_lower_on(holders: Mask, scores: Scores | Counts, view: RouteView, num_tokens: int) -> bool:
    """Return whether the lowest score on M is below the lowest elsewhere; both have a routable engine.

    Args:
        num_tokens: tokens of the prompt that the engines of M have.
    """
    engines = view.engines
    if (kernel := route_kernel.look()) is not None:
        found = kernel.is_lower(engines, scores, view.hit_tokens, num_tokens)
        if found is not None:
            return found
    # Twice as fast as a selection of rows by a mask.
    inside, outside = np.where(holders, scores, np.inf), np.where(holders, np.inf, scores)
    if not all_true(engines.routable):
        outside[~engines.routable] = np.inf
    return bool(inside.min() < outside.min())


def _block(hashes: bytes, depth: int) -> bytes:
    """Return the hash of the block at `depth`, counted from 1."""
    return hashes[(depth - 1) * HASH_BYTES : depth * HASH_BYTES]


Mitigation = Literal["off", "filter", "load"]
_DETECTOR = HotspotSettings()


def lmetric_score(view: RouteView) -> Scores:
    """Return P-token * (batch + 1): tokens to prefill on the engine times its batch, both including the request.

    Source: LMetric, Fig. 17 (b); the added 1 is the request itself, as in the authors' `lmetric.rs`.
    """
    if (kernel := route_kernel.look()) is not None:
        found = kernel.products(view.engines, view.hit_tokens, view.request.num_known_tokens)
        if found is not None:
            return found
    scores = p_tokens(view)
    scores *= batch_size(view) + ONE
    return scores


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
        detail = alarm.detail()
        if not alarm.second:
            return choose(view, scores, draws, "P-token * batch", detail=detail)
        if self.hotspots == "filter":
            assert alarm.holders is not None, "the second phase follows the first"
            return choose(view, scores, draws, "hotspot left out; P-token * batch", ~alarm.holders, detail)
        return choose(view, least_loaded_score(view), draws, "hotspot; smallest batch", detail=detail)

    def observe(self, event: RouteEvent) -> None:
        """Update the detector's window and streaks, and count alarms."""
        if self._detector is None or not isinstance(event, Routed):
            return
        detail = event.detail
        if not detail:
            self._detector.note(event, 0, is_lower=False)
            return
        self.num_alarms[0] += int(detail.get("first_alarm", 0))
        self.num_alarms[1] += int(detail.get("second_alarm", 0))
        self._detector.note(event, int(detail.get("class_blocks", 0)), is_lower=bool(detail.get("is_lower", 0)))
