"""Prometheus' text format: histograms for the hot path, and the page that a server exposes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts observations by bucket.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; one more bucket lies above the last.
        counts: Number of observations in each bucket, not cumulated.
        total: Sum of the observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation. Takes less than 1 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Return the observations of all `histograms`, which must have the same bounds."""
    first, *others = histograms
    merged = Histogram(first.bounds)
    merged.counts = [sum(counts) for counts in zip(first.counts, *(other.counts for other in others), strict=True)]
    merged.total = sum((other.total for other in others), first.total)
    return merged


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return each bucket's upper bound as Prometheus writes it, and the number of observations at most as large."""
    names = (*map(str, histogram.bounds), "+Inf")
    return [(name, float(count)) for name, count in zip(names, accumulate(histogram.counts), strict=True)]


class Exposition:
    """Writes `GET /metrics`: the metrics of some collectors and of this process, collected at every scrape."""

    def __init__(self, *collectors: Collector) -> None:
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics with their present values."""
        return generate_latest(self._registry)
