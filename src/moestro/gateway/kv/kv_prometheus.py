"""Prometheus metrics of KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.gateway.kv.kv_watch import KvEventsWatch
from moestro.routing.kv.kv_events import KvFeed

_COUNTERS: tuple[tuple[str, str, Callable[[KvFeed], float]], ...] = (
    ("batches", "Applied batches of KV events.", lambda f: f.counts.stream.batches),
    ("replayed", "Batches of KV events that a replay brought.", lambda f: f.counts.stream.replayed),
    ("gaps", "Gaps in the sequence of batches.", lambda f: f.counts.stream.gaps),
    ("losses", "Gaps that no replay filled, after which the index was dropped.", lambda f: f.counts.stream.lost),
    ("unanswered_replays", "Replays that were not answered in time.", lambda f: f.counts.stream.unanswered),
    ("restarts", "Restarts of the publishing process.", lambda f: f.counts.stream.restarts),
    ("stored_blocks", "Blocks that were stored and indexed.", lambda f: f.counts.blocks.stored),
    ("removed_blocks", "Blocks that were removed from all tiers.", lambda f: f.counts.blocks.removed),
    ("unknown_events", "Events of unknown types.", lambda f: f.counts.unknown),
    ("illegible_events", "Events or messages that could not be read.", lambda f: f.counts.illegible),
)


class KvFigures(Collector):
    """Exposes KV event figures: one metric family per figure, labelled by engine."""

    def __init__(self, watch: KvEventsWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their current values."""
        running = list(self._watch)
        for name, text, of_feed in _COUNTERS:
            family = CounterMetricFamily(f"moestro:route_kv_{name}", text, labels=("engine",))
            for engine, subscription in running:
                family.add_metric((engine.name,), of_feed(subscription.feed))
            yield family
        left_out = CounterMetricFamily(
            "moestro:route_kv_left_out_blocks",
            "Blocks that were stored but not indexed, by cause.",
            labels=("engine", "cause"),
        )
        incomplete = CounterMetricFamily(
            "moestro:route_kv_incomplete",
            "Times that the known blocks ceased to be all blocks that the engine holds, by reason.",
            labels=("engine", "reason"),
        )
        blocks = _gauge("blocks", "Blocks that the engine holds.")
        hosted = _gauge("hosted_blocks", "Blocks that the engine holds in host memory alone.")
        is_complete = _gauge("complete", "1 while the router knows all blocks that the engine holds.")
        lag = _gauge("lag_seconds", "Delay of the newest batch from its time stamp to its arrival.")
        for engine, subscription in running:
            feed, named = subscription.feed, subscription.feed.counts.blocks
            for reason, number in feed.counts.incomplete.items():
                incomplete.add_metric((engine.name, reason), number)
            for cause in ("orphaned", "unnamed", "malformed", "other_size", "other_tier", "other_group", "over_bound"):
                left_out.add_metric((engine.name, cause), getattr(named, cause))
            blocks.add_metric((engine.name,), feed.num_blocks)
            hosted.add_metric((engine.name,), feed.num_hosted_blocks)
            is_complete.add_metric((engine.name,), feed.is_complete)
            lag.add_metric((engine.name,), subscription.lag_s)
        yield from (left_out, incomplete, blocks, hosted, is_complete, lag)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"moestro:route_kv_{name}", text, labels=("engine",))
