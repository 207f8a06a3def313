"""Prometheus metrics of the exchange with other routers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.gateway.peers.exchange import PeerExchange


class PeerCollector(Collector):
    """Exposes the counts of an exchange as Prometheus metric families."""

    def __init__(self, exchange: PeerExchange) -> None:
        self._exchange = exchange

    def collect(self) -> Iterator[Metric]:
        """Yield all families with their current values."""
        exchange = self._exchange
        links, counts = exchange.counts, exchange.replica.counts
        for name, text, value in (
            ("peers", "Other routers that sent a message lately.", exchange.replica.num_peers),
            ("peer_links", "Open connections that this router made to others.", exchange.num_links),
            ("peer_in_flight", "Requests of other routers that count here.", exchange.replica.num_flights),
        ):
            yield GaugeMetricFamily(f"moestro:route_{name}", text, value=value)
        for name, text, value in (
            ("peer_messages", "Messages sent to other routers.", links.num_messages),
            ("peer_refused", "Connections of routers that either end refused.", links.num_refused),
            ("peer_operations", "Operations of other routers that were applied.", counts.num_operations),
            ("peer_repeated", "Operations of other routers that came again.", counts.num_repeated),
            ("peer_gaps", "Requests for missing operations.", counts.num_gaps),
            ("peer_snapshots", "Snapshots of other routers that were applied.", counts.num_snapshots),
            ("peer_differences", "Digests that did not equal the copy here.", counts.num_differences),
            ("peer_expired", "Times that a router was silent for too long to count.", counts.num_expired),
        ):
            yield CounterMetricFamily(f"moestro:route_{name}", text, value=value)
        text = "Bytes exchanged with other routers."
        family = CounterMetricFamily("moestro:route_peer_bytes", text, labels=("direction",))
        family.add_metric(("sent",), links.num_sent_bytes)
        family.add_metric(("received",), links.num_received_bytes)
        yield family
