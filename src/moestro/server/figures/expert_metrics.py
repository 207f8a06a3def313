"""The load of experts for Prometheus: a few series, whatever the number of layers and experts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moestro.core.clock import NS_PER_S
from moestro.core.experts.near_experts import DISTANCES, SAME_DEVICE
from moestro.core.load_figures import FIGURES
from moestro.server.engines.expert_loads import ExpertLoads
from moestro.server.experts.expert_signals import ExpertSignals


def expert_metrics(
    loads: ExpertLoads, model_name: str, now_ns: Callable[[], int] = time.monotonic_ns
) -> Iterator[Metric]:
    """Yield the metrics of the last reports, and ask the engines for new ones, which the next scrape shows."""
    loads.refresh(now_ns())
    merged, label = loads.merged(), (model_name,)
    mean = GaugeMetricFamily(
        "moestro:expert_balance",
        "Mean load of a layer's experts over the largest, mean of all layers; 1 means even.",
        labels=("model_name",),
    )
    worst = GaugeMetricFamily(
        "moestro:expert_balance_min", "The same of the layer with the least even load.", labels=("model_name",)
    )
    if merged is not None:
        mean.add_metric(label, float(merged.balance.mean()))
        worst.add_metric(label, float(merged.balance.min()))
    yield from (mean, worst)
    yield from _by_engine(loads, model_name, now_ns())


def _by_engine(loads: ExpertLoads, model_name: str, now_ns: int) -> Iterator[Metric]:
    labels = ("model_name", "engine")
    visits = CounterMetricFamily(
        "moestro:expert_visits", "Visits of the engine's tokens to experts, in all layers.", labels=labels
    )
    steps = GaugeMetricFamily("moestro:expert_window_steps", "Steps in the window of expert load.", labels=labels)
    age = GaugeMetricFamily(
        "moestro:expert_window_age_seconds", "Age of the engine's report of its expert load.", labels=labels
    )
    for engine, report in enumerate(loads.engines):
        if report.at_ns is not None:
            values = (model_name, str(engine))
            visits.add_metric(values, report.num_visits)
            steps.add_metric(values, report.num_steps)
            age.add_metric(values, (now_ns - report.at_ns) / NS_PER_S)
    yield from (visits, steps, age)


def signal_metrics(
    signals: ExpertSignals, model_name: str, now_ns: Callable[[], int] = time.monotonic_ns
) -> Iterator[Metric]:
    """Yield what routers learn of the experts of a group. A figure that is old, or was never known, is absent."""
    labels = ("model_name", "engine")
    pressure, local = FIGURES["expert_pressure"], FIGURES["expert_local_share"]
    pressures = GaugeMetricFamily(f"moestro:{pressure.metric}", pressure.help, labels=labels)
    locals_ = GaugeMetricFamily(f"moestro:{local.metric}", local.help, labels=labels)
    visits = GaugeMetricFamily(
        "moestro:expert_visit_share",
        "Fraction of the visits of the engine's tokens to experts on its device, elsewhere on its machine, and on other"
        " machines.",
        labels=(*labels, "distance"),
    )
    near = GaugeMetricFamily(
        "moestro:expert_near_share",
        "Fraction of a layer's experts with a copy on the engine's device, or else on its machine, or else on other"
        " machines; mean of all layers.",
        labels=(*labels, "distance"),
    )
    for engine in range(signals.num_engines):
        values, signal = (model_name, str(engine)), signals.of_engine(engine, now_ns())
        if signal is not None:
            pressures.add_metric(values, signal.pressure)
            if signal.visits is not None:
                locals_.add_metric(values, signal.visits[SAME_DEVICE])
                for distance, share in zip(DISTANCES, signal.visits, strict=True):
                    visits.add_metric((*values, distance), share)
        if signals.near_experts is not None:
            for distance, share in zip(DISTANCES, signals.near_experts[engine].mean(axis=1).tolist(), strict=True):
                near.add_metric((*values, distance), share)
    yield from (pressures, locals_, visits, near)
