"""Log lines about paced devices: how late this machine was, and a warning where that makes the figures untrue."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from moestro.core.load_figures import PaceCounts
from moestro.server.engines.engine_client import EngineClient
from moestro.server.experts.coordinator import Coordinator

logger = logging.getLogger(__name__)

# Mean lateness of items, or of messages between workers, over the mean duration of items, above which a paced run is
# invalid: a device that is later stands for a slower one. Half of the 10 % by which paced and simulated may differ.
MAX_LATE_SHARE = 0.05


class PaceLines:
    """Reports how late the ends of modelled items were taken in since the last report.

    Args:
        engines: Has the figures of engines.
        coordinator: Has those of the workers of a group; None means that there is no group.
    """

    def __init__(self, engines: EngineClient, coordinator: Coordinator | None) -> None:
        self._engines, self._coordinator = engines, coordinator
        self._before: dict[str, PaceCounts] = {}

    def lines(self) -> list[str]:
        """Return a line for each paced process that took in items, and log a warning in place of a bad one."""
        before, self._before, lines = self._before, dict(self._counts()), []
        for name, now in self._before.items():
            gained = _since(before.get(name), now)
            if not gained.num_items:
                continue
            if _late_share(gained) > MAX_LATE_SHARE:
                logger.warning(
                    "%s, above the %.0f%% of a valid run: raise --pace-dilation, or lower the load of this machine",
                    _line(name, gained),
                    100 * MAX_LATE_SHARE,
                )
            else:
                lines.append(_line(name, gained))
        return lines

    def _counts(self) -> Iterator[tuple[str, PaceCounts]]:
        for engine, load in enumerate(self._engines.loads):
            if load.pace is not None:
                yield f"engine {engine}", load.pace
        for view in () if self._coordinator is None else self._coordinator.views():
            if view.figures is not None and view.figures.pace is not None:
                yield view.name, view.figures.pace


def _since(old: PaceCounts | None, now: PaceCounts) -> PaceCounts:
    """Return what came after `old`; the counts of a restarted process begin at 0."""
    if old is None or now.num_items < old.num_items:
        return now
    return PaceCounts(
        dilation=now.dilation,
        num_items=now.num_items - old.num_items,
        item_ns=now.item_ns - old.item_ns,
        late_ns=now.late_ns - old.late_ns,
        wait_ns=now.wait_ns - old.wait_ns,
        num_messages=now.num_messages - old.num_messages,
        message_late_ns=now.message_late_ns - old.message_late_ns,
    )


def _late_share(gained: PaceCounts) -> float:
    """Return the larger mean lateness, of items or of messages, over the mean duration of items."""
    item_ns, late_ns, message_late_ns = _means_ns(gained)
    worst_ns = max(late_ns, message_late_ns)
    return worst_ns / item_ns if item_ns else math.inf


def _means_ns(gained: PaceCounts) -> tuple[float, float, float]:
    """Return the mean duration and the mean lateness of an item, and the mean lateness of a message."""
    num_items, num_messages = gained.num_items, max(gained.num_messages, 1)
    return gained.item_ns / num_items, gained.late_ns / num_items, gained.message_late_ns / num_messages


def _line(name: str, gained: PaceCounts) -> str:
    item_us, late_us, message_late_us = (mean_ns / 1e3 for mean_ns in _means_ns(gained))
    messages = f", {gained.num_messages} messages {message_late_us:.0f} us late" if gained.num_messages else ""
    return (
        f"{name}: paced, times dilated x {gained.dilation:g}; {gained.num_items} items of {item_us:.0f} us taken in"
        f" {late_us:.0f} us late{messages}: {_late_share(gained):.1%} of an item"
    )
