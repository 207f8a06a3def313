"""LMetric's two-phase detector of KV hotspots: prefixes so hot that P-token times batch cannot spread them.

A request's class is the deepest block of its prompt that it shares with at least `min_share` of the window's requests;
a block that more than `max_share` of them have tells nobody apart and makes no class. M are the engines that hold the
class's block, x is the class's share of the window.

First phase (equations 2 and 3): x / (1 - x) > |M| / (the other engines): were all of the class sent to M, a batch there
would outgrow the others'. Second phase (equation 4): more than 2 |M| requests of the class in a row scored lower on M
than elsewhere, so the growing batch does not push them away. Then M is a hotspot for this class.

Source: LMetric, section 5.2.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moestro.core.hashing import HASH_BYTES
from moestro.core.prefix_tree import BlockRun, PrefixTree
from moestro.errors import ConfigError
from moestro.routing.policy_contract import Routed, RouteView
from moestro.routing.scoring import Counts, Mask, Scores

_ALL = 0  # the one holder in the window's tree


@dataclass(frozen=True, slots=True, kw_only=True)
class HotspotSettings:
    """What the detector looks at.

    Attributes:
        window_s: seconds of requests; one minute in the paper.
        max_requests: the window's newest, so many at most, so that its memory is bounded.
        min_share, max_share: of the window's requests; see above.
        max_classes: tracked at a time: those whose hits save the most blocks.
    """

    window_s: float = 60.0
    max_requests: int = 2048
    min_share: float = 0.01
    max_share: float = 0.9
    max_classes: int = 16

    def __post_init__(self) -> None:
        if not (self.window_s > 0 and self.max_requests > 0 and self.max_classes > 0):
            raise ConfigError("window_s, max_requests and max_classes must be above 0")
        if not 0 < self.min_share < self.max_share <= 1:
            raise ConfigError("0 < min_share < max_share <= 1 must hold")


class PrefixClass(NamedTuple):
    """A class of requests: the block that they share, blocks up to and with it, and requests of the window in it."""

    block: bytes
    num_blocks: int
    num_requests: int


class Alarm(NamedTuple):
    """What the detector says of one request.

    Attributes:
        num_blocks: that its class shares; 0: it has no class that is tracked.
        holders: bool[n], M: routable engines that hold them.
        first: the first phase's alarm.
        is_lower: the least score on M is below the least elsewhere.
        second: the second phase's.
        class_share: x, of the window's requests.
        holder_share: |M| of the routable engines; the first phase's alarm is that it is below x, and neither 0 nor 1.
    """

    num_blocks: int
    holders: Mask
    first: bool = False
    is_lower: bool = False
    second: bool = False
    class_share: float = 0.0
    holder_share: float = 0.0


class _Tracked:
    """A class that is tracked: the run that ends with its block, and how many requests in a row scored lower on M."""

    __slots__ = ("run", "streak")

    def __init__(self, run: BlockRun) -> None:
        self.run = run
        self.streak = 0

    def saved(self) -> int:
        """Blocks that hits of this class can save in one window."""
        return self.run.counts.get(_ALL, 0) * self.run.depth


class HotspotDetector:
    """Watches the window; asked before each decision, told after it."""

    def __init__(self, settings: HotspotSettings) -> None:
        self._settings = settings
        self._window_ns = int(settings.window_s * 1e9)
        self._tree = PrefixTree()  # of the window's prompts
        self._window: deque[tuple[int, BlockRun | None]] = deque()
        self._tracked: dict[bytes, _Tracked] = {}  # by their blocks

    def look(self, view: RouteView, scores: Scores | Counts) -> Alarm:
        """What this request's class does to the engines. `scores`: the product, [n]."""
        routable = view.engines.routable
        own = self.class_of(view.request.block_hashes)
        if own is None or own.block not in self._tracked:
            return Alarm(0, np.zeros(len(routable), np.bool_))
        holders = routable & (view.hit_tokens >= own.num_blocks * view.block_size)
        others = routable & ~holders
        num_holders, num_others = int(np.count_nonzero(holders)), int(np.count_nonzero(others))
        outside = len(self._window) - own.num_requests
        # x / (1 - x) > |M| / |others|, without a division by nothing.
        first = num_holders > 0 and num_others > 0 and own.num_requests * num_others > num_holders * outside
        is_lower = first and bool(scores[holders].min() < scores[others].min())
        second = is_lower and self._tracked[own.block].streak + 1 > 2 * num_holders
        class_share = own.num_requests / len(self._window)
        return Alarm(
            own.num_blocks, holders, first, is_lower, second, class_share, num_holders / (num_holders + num_others)
        )

    def note(self, event: Routed, alarm_blocks: int, *, is_lower: bool) -> None:
        """A request was routed; `alarm_blocks` and `is_lower`: what `look` said of it."""
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
        """The class of a prompt, by the window as it is."""
        last, num_blocks = self._tree.find(hashes)
        run = self._shared(last)
        if run is None:
            return None
        num_blocks = min(run.depth, num_blocks)
        return PrefixClass(_block(hashes, num_blocks), num_blocks, run.counts[_ALL])

    def _shared(self, run: BlockRun | None) -> BlockRun | None:
        """The last run, up to and with `run`, that enough of the window's requests have; None if nearly all do."""
        num_requests = len(self._window)
        least = max(2, self._settings.min_share * num_requests)
        while run is not None and run.counts[_ALL] < least:
            run = run.parent
        if run is None or run.counts[_ALL] > self._settings.max_share * num_requests:
            return None
        return run

    @property
    def num_tracked(self) -> int:
        """Classes tracked now."""
        return len(self._tracked)

    def _track(self, last: BlockRun, hashes: bytes) -> None:
        """Track the class of a prompt of the window, if there is room, or it saves more than the least tracked."""
        run = self._shared(last)
        if run is None:
            return
        block, tracked = _block(hashes, run.depth), self._tracked
        if block in tracked:
            tracked[block].run = run  # another, if the class had left the window and come back
            return
        if len(tracked) == self._settings.max_classes:
            least = min(tracked, key=lambda each: tracked[each].saved())
            if tracked[least].saved() >= run.counts[_ALL] * run.depth:
                return
            del tracked[least]
        tracked[block] = _Tracked(run)

    def _slide(self, now_ns: int) -> None:
        """Let go of requests that are too old, or too many with one more."""
        window = self._window
        while window and (window[0][0] < now_ns - self._window_ns or len(window) >= self._settings.max_requests):
            last = window.popleft()[1]
            if last is not None:
                self._tree.drop(_ALL, last)


def _block(hashes: bytes, depth: int) -> bytes:
    """The last of the first `depth` blocks."""
    return hashes[(depth - 1) * HASH_BYTES : depth * HASH_BYTES]
