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

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moestro.core.hashing import HASH_BYTES
from moestro.errors import ConfigError
from moestro.policy.routing.contract import Routed, RouteView
from moestro.policy.routing.scoring import Counts, Mask, Scores


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


class HotspotDetector:
    """Watches the window; asked before each decision, told after it."""

    def __init__(self, settings: HotspotSettings) -> None:
        self._settings = settings
        self._window_ns = int(settings.window_s * 1e9)
        self._window: deque[tuple[int, bytes]] = deque()
        self._counts: Counter[bytes] = Counter()  # of each block, in how many of the window's prompts it is
        self._streaks: dict[bytes, int] = {}  # of each tracked class's block
        self._depths: dict[bytes, int] = {}

    def look(self, view: RouteView, scores: Scores | Counts) -> Alarm:
        """What this request's class does to the engines. `scores`: the product, [n]."""
        routable = view.engines.routable
        own = self.class_of(view.request.block_hashes)
        if own is None or own.block not in self._streaks:
            return Alarm(0, np.zeros(len(routable), np.bool_))
        holders = routable & (view.hit_tokens >= own.num_blocks * view.block_size)
        others = routable & ~holders
        num_holders, num_others = int(holders.sum()), int(others.sum())
        outside = len(self._window) - own.num_requests
        # x / (1 - x) > |M| / |others|, without a division by nothing.
        first = num_holders > 0 and num_others > 0 and own.num_requests * num_others > num_holders * outside
        is_lower = first and bool(scores[holders].min() < scores[others].min())
        second = is_lower and self._streaks[own.block] + 1 > 2 * num_holders
        class_share = own.num_requests / len(self._window)
        return Alarm(
            own.num_blocks, holders, first, is_lower, second, class_share, num_holders / (num_holders + num_others)
        )

    def note(self, event: Routed, alarm_blocks: int, *, is_lower: bool) -> None:
        """A request was routed; `alarm_blocks` and `is_lower`: what `look` said of it."""
        hashes = event.request.block_hashes
        if alarm_blocks:
            block = hashes[(alarm_blocks - 1) * HASH_BYTES : alarm_blocks * HASH_BYTES]
            self._streaks[block] = self._streaks[block] + 1 if is_lower else 0
        self._slide(event.now_ns)
        self._window.append((event.now_ns, hashes))
        self._counts.update(_blocks(hashes))
        own = self.class_of(hashes)
        if own is not None:
            self._track(own)

    def class_of(self, hashes: bytes) -> PrefixClass | None:
        """The class of a prompt, by the window as it is."""
        blocks, num_requests = _blocks(hashes), len(self._window)
        least = max(2, self._settings.min_share * num_requests)
        low, high = 0, len(blocks)  # a block's count never exceeds its parent's: bisect for the last that has enough
        while low < high:
            middle = (low + high + 1) // 2
            if self._counts.get(blocks[middle - 1], 0) >= least:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            return None
        count = self._counts[blocks[low - 1]]
        if count > self._settings.max_share * num_requests:
            return None
        return PrefixClass(blocks[low - 1], low, count)

    @property
    def num_tracked(self) -> int:
        """Classes tracked now."""
        return len(self._streaks)

    def _track(self, own: PrefixClass) -> None:
        """Track the class, if it saves more than the least of those tracked, or there is room."""
        if own.block in self._streaks:
            return
        if len(self._streaks) == self._settings.max_classes:
            least = min(self._streaks, key=self._saved)
            if self._saved(least) >= own.num_requests * own.num_blocks:
                return
            del self._streaks[least], self._depths[least]
        self._streaks[own.block], self._depths[own.block] = 0, own.num_blocks

    def _saved(self, block: bytes) -> int:
        """Blocks that hits of this class can save in one window."""
        return self._counts.get(block, 0) * self._depths[block]

    def _slide(self, now_ns: int) -> None:
        """Let go of requests that are too old, or too many with one more."""
        window, counts = self._window, self._counts
        while window and (window[0][0] < now_ns - self._window_ns or len(window) >= self._settings.max_requests):
            for block in _blocks(window.popleft()[1]):
                left = counts[block] - 1
                if left:
                    counts[block] = left
                else:
                    del counts[block]


def _blocks(hashes: bytes) -> list[bytes]:
    """One `bytes` a block, and quickly: NumPy's void rows come out as bytes."""
    return np.frombuffer(hashes, f"V{HASH_BYTES}").tolist()  # type: ignore[no-any-return]
