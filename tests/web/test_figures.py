"""The text of `/metrics` equals that of Prometheus's library, scrape after scrape."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.web.figures import Exposition, Histogram, buckets

LABELS = ("model_name", "engine")
NAMES = ("plain", 'a "quoted" \\ name\nof two lines', "日本語")
NUMBERS = (0, 0.1, 1e-7, 999_999.5, 1e6, 1234567.25, 2**53, 1e300, -1e7, float("inf"), float("-inf"), float("nan"))


class ChangingCollector(Collector):
    """Families of each kind, whose numbers change and whose engines come and go."""

    def __init__(self) -> None:
        self.num_engines, self.shift = 1, 0

    def collect(self) -> Iterator[Metric]:
        engines = [(NAMES[engine % 3], str(engine)) for engine in range(self.num_engines)]
        gauge = GaugeMetricFamily("moestro:level", "A level.", labels=LABELS)
        counter = CounterMetricFamily("moestro:events", 'Of "some" \\ kind\nin two lines.', labels=LABELS)
        histogram = HistogramMetricFamily("moestro:seconds", "Durations.", labels=LABELS)
        for at, labels in enumerate(engines, self.shift):
            gauge.add_metric(labels, NUMBERS[at % len(NUMBERS)])
            counter.add_metric(labels, 1e5 * at)
            durations = Histogram((0.5, 1.0, 2.5))
            for each in range(at):
                durations.observe(each / 3)
            histogram.add_metric(labels, buckets(durations), durations.total)
        yield from (gauge, counter, histogram)
        yield CounterMetricFamily("moestro:alone", "Without labels.", value=self.shift)


def without_process(text: bytes) -> str:
    """The text without the metrics of this process, which change all the time."""
    return re.sub(r"(?m)^(# \w+ )?process_.*\n", "", text.decode())


def test_each_scrape_is_the_text_of_the_library():
    collector, registry = ChangingCollector(), CollectorRegistry()
    registry.register(collector)
    exposition = Exposition(collector)
    for collector.num_engines, collector.shift in ((1, 0), (5, 1), (12, 3), (2, 9), (0, 4), (12, 7)):
        text = exposition.text()
        assert without_process(text) == generate_latest(registry).decode()
        assert b"process_open_fds " in text


def test_series_of_engines_that_have_gone_are_not_kept():
    collector = ChangingCollector()
    exposition = Exposition(collector)
    collector.num_engines = 50
    exposition.text()
    num_kept = len(exposition._series)
    collector.num_engines = 1
    exposition.text()
    assert len(exposition._series) < num_kept / 5
