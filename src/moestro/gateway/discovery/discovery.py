"""Follows the lists of engines while the router runs, and counts what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.errors import ConfigError
from moestro.gateway.discovery.entries import EngineEntry

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_AGAIN_S = 1.0
_SHOWN_CHARS = 300


class ListListener(Protocol):
    """Receives what a source finds."""

    def report(self, entries: Sequence[EngineEntry] | None, fault: str = "") -> None:
        """Take in a whole list.

        Args:
            entries: The list; None means that none can be had now, and the last one stays.
            fault: What went wrong, empty if nothing did.
        """


class EngineSource(Protocol):
    """A list of engines that changes.

    Attributes:
        name: Name of the source, one of `SOURCES`.
        what: Its flag and value, for the log.
    """

    name: str
    what: str

    async def follow(self, listener: ListListener) -> None:
        """Report every list until cancelled."""


class Discovery(Collector):
    """The sources of one router.

    Args:
        take: Called with a source's name and its list.
        tick: Called twice a second with the time, for engines that are listed no more.
    """

    def __init__(
        self,
        sources: Sequence[EngineSource],
        take: Callable[[str, Sequence[EngineEntry]], None],
        tick: Callable[[int], None],
    ) -> None:
        self._take = take
        self._tick = tick
        self._followers = [_Follower(source, take) for source in sources]

    @contextlib.asynccontextmanager
    async def running(self, first_s: float) -> AsyncIterator[None]:
        """Follow the sources inside the block, which begins when each has reported once.

        Args:
            first_s: Longest wait for the first reports, seconds.
        """
        if not self._followers:
            yield
            return
        tasks = [asyncio.create_task(follower.run()) for follower in self._followers]
        tasks.append(asyncio.create_task(self._tick_forever()))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(first_s):
                    await asyncio.gather(*(follower.has_reported.wait() for follower in self._followers))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._tick(time.monotonic_ns())
            except Exception:
                logger.exception("the removal of engines that are listed no more failed; it continues")

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the sources."""
        now_s = time.monotonic()
        engines = GaugeMetricFamily(
            "moestro:route_discovery_engines", "Engines in the last good list of the source.", labels=("source",)
        )
        age = GaugeMetricFamily(
            "moestro:route_discovery_age_seconds",
            "Time since the source was last read without a fault.",
            labels=("source",),
        )
        reads = CounterMetricFamily(
            "moestro:route_discovery_reads",
            "Reads of the source, by result: changed, same, or failed, which leaves the last list in place.",
            labels=("source", "result"),
        )
        for follower in self._followers:
            name = follower.source.name
            engines.add_metric((name,), len(follower.entries))
            age.add_metric((name,), now_s - follower.read_s)
            for result in ("changed", "same", "failed"):
                reads.add_metric((name, result), follower.counts[result])
        yield from (engines, age, reads)


class _Follower:
    """Follows one source.

    Attributes:
        entries: Its last good list.
        read_s: Time on `time.monotonic` of the last good read.
        counts: Reads by result.
        has_reported: Set by the first report.
    """

    def __init__(self, source: EngineSource, take: Callable[[str, Sequence[EngineEntry]], None]) -> None:
        self.source = source
        self._take = take
        self._fault = ""
        self._has_list = False
        self.entries: tuple[EngineEntry, ...] = ()
        self.read_s = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.has_reported = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                await self.source.follow(self)
            except ConfigError as error:
                self.report(None, str(error))
            except Exception:
                logger.exception("%s could not be followed; it is tried again", self.source.what)
                self.report(None, "an unexpected error")
            await asyncio.sleep(_AGAIN_S)

    def report(self, entries: Sequence[EngineEntry] | None, fault: str = "") -> None:
        """Implement `ListListener.report`. A fault that lasts is logged once."""
        fault = fault[:_SHOWN_CHARS]
        if entries is not None:
            listed = tuple(entries)
            has_changed = listed != self.entries or not self._has_list
            self.entries, self._has_list = listed, True
            self.counts["changed" if has_changed else "same"] += 1
            if has_changed:
                self._take(self.source.name, listed)
        if fault:
            self.counts["failed"] += 1
        else:
            self.read_s = time.monotonic()
        self._log(fault)
        self.has_reported.set()

    def _log(self, fault: str) -> None:
        before, self._fault = self._fault, fault
        if fault and fault != before:
            kept = f"; the last list of {len(self.entries)} engines stays in place" if self._has_list else ""
            logger.warning("%s: %s%s", self.source.what, fault, kept)
        elif before and not fault:
            logger.info("%s can be read again: %d engines", self.source.what, len(self.entries))
