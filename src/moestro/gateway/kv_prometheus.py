"""What became of KV events, in Prometheus' families."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.gateway.kv_watch import KvEventsWatch
from moestro.routing.kv_events import KvFeed

_COUNTERS: tuple[tuple[str, str, Callable[[KvFeed], float]], ...] = (
    ("batches", "Batches of KV events taken in.", lambda f: f.counts.stream.batches),
    ("replayed", "Of these, that came by replay.", lambda f: f.counts.stream.replayed),
    ("gaps", "Times that batches were missing.", lambda f: f.counts.stream.gaps),
    ("losses", "Times that they could not be had again, and the index was dropped.", lambda f: f.counts.stream.lost),
    ("unanswered_replays", "Replays that were not answered in time.", lambda f: f.counts.stream.unanswered),
    ("restarts", "Times that another process published.", lambda f: f.counts.stream.restarts),
    ("stored_blocks", "Blocks said to be stored, and named.", lambda f: f.counts.blocks.stored),
    ("removed_blocks", "Blocks said to be gone from all tiers.", lambda f: f.counts.blocks.removed),
    ("unknown_events", "Events of unknown types.", lambda f: f.counts.unknown),
    ("illegible_events", "Events or messages that could not be read.", lambda f: f.counts.illegible),
)


class KvFigures(Collector):
    """One family a figure, one label an engine."""

    def __init__(self, watch: KvEventsWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now."""
        running = list(self._watch)
        for name, text, of_feed in _COUNTERS:
            family = CounterMetricFamily(f"moestro:route_kv_{name}", text, labels=("engine",))
            for engine, subscription in running:
                family.add_metric((engine.name,), of_feed(subscription.feed))
            yield family
        left_out = CounterMetricFamily(
            "moestro:route_kv_left_out_blocks", "Blocks said to be stored, and not counted.", labels=("engine", "cause")
        )
        blocks = _gauge("blocks", "Blocks that the engine is known to hold.")
        is_complete = _gauge("complete", "1 while nothing is missing of what it said since its start.")
        lag = _gauge("lag_seconds", "From the time stamp of the newest batch to its arrival.")
        for engine, subscription in running:
            feed, named = subscription.feed, subscription.feed.counts.blocks
            for cause in ("orphaned", "unnamed", "other_size", "other_tier", "other_group", "over_bound"):
                left_out.add_metric((engine.name, cause), getattr(named, cause))
            blocks.add_metric((engine.name,), feed.num_blocks)
            is_complete.add_metric((engine.name,), feed.stream.is_complete)
            lag.add_metric((engine.name,), subscription.lag_s)
        yield from (left_out, blocks, is_complete, lag)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"moestro:route_kv_{name}", text, labels=("engine",))
