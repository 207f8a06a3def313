"""Log lines about paced devices: how late this machine was, and a warning where that makes the figures untrue."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from moestro.core.load_figures import PaceCounts
from moestro.server.coordinator import Coordinator
from moestro.server.engine_client import EngineClient

logger = logging.getLogger(__name__)

# Mean lateness over mean duration of items, above which a paced run is invalid: a device that is later stands for a
# slower one. Half of the 10 % within which paced and simulated runs are to agree.
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
            if gained.late_ns > MAX_LATE_SHARE * gained.item_ns:
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
    )


def _line(name: str, gained: PaceCounts) -> str:
    item_us, late_us = gained.item_ns / gained.num_items / 1e3, gained.late_ns / gained.num_items / 1e3
    share = f" ({late_us / item_us:.1%})" if item_us else ""
    return (
        f"{name}: paced, times dilated x {gained.dilation:g}; {gained.num_items} items of {item_us:.0f} us, taken in"
        f" {late_us:.0f} us late{share}"
    )
