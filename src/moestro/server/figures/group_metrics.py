"""Figures that the workers of a group report, for Prometheus and for the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moestro.core.clock import NS_PER_S
from moestro.core.load_figures import FIGURES, FigureKind, PaceCounts
from moestro.core.worker_names import WorkerKind
from moestro.server.experts.coordinator import Coordinator, WorkerView

_WORKER = ("worker",)


def group_metrics(coordinator: Coordinator) -> Iterator[Metric]:
    """Yield the metrics of a group's workers with their present values."""
    views = coordinator.views()
    serving = GaugeMetricFamily("moestro:worker_serving", "1 while the worker serves.", labels=_WORKER)
    restarts = CounterMetricFamily("moestro:worker_restarts", "Restarts of the worker's process.", labels=_WORKER)
    doubts = CounterMetricFamily(
        "moestro:worker_doubts",
        "Times at which the worker was silent, so that workers with copies took over its tokens.",
        labels=_WORKER,
    )
    for view in views:
        serving.add_metric((view.name,), float(view.phase == "serving"))
        restarts.add_metric((view.name,), view.num_restarts)
        if view.kind is not WorkerKind.ATTENTION:
            doubts.add_metric((view.name,), view.num_doubts)
    yield from (serving, restarts, doubts)
    reporting = [view for view in views if view.figures is not None]
    yield from _queues(reporting)
    yield from _links(reporting, coordinator)
    yield from _pace(reporting)


def _queues(views: list[WorkerView]) -> Iterator[Metric]:
    labels = (*_WORKER, "layer")
    depth = GaugeMetricFamily(
        "moestro:worker_queue_tokens",
        "Tokens before a layer's attention and pairs of token and expert before its experts.",
        labels=labels,
    )
    age = GaugeMetricFamily(
        "moestro:worker_queue_age_seconds", "Time for which the oldest token of a layer waits.", labels=labels
    )
    idle = CounterMetricFamily(
        "moestro:worker_idle_seconds", "Time in which nothing could run; under load, the stall.", labels=_WORKER
    )
    dropped = CounterMetricFamily(
        "moestro:worker_messages_dropped",
        "Messages and contributions of workers that came for nothing: their request was aborted or preempted, or a"
        " worker had ended. Also repeated and unreadable ones.",
        labels=_WORKER,
    )
    for view in views:
        assert view.figures is not None, "views without figures are left out"
        for layer, (num, oldest_ns) in enumerate(zip(view.figures.num_waiting, view.figures.oldest_ns, strict=True)):
            depth.add_metric((view.name, str(layer)), num)
            age.add_metric((view.name, str(layer)), oldest_ns / NS_PER_S)
        idle.add_metric((view.name,), view.figures.idle_ns / NS_PER_S)
        dropped.add_metric((view.name,), view.figures.num_dropped)
    yield from (depth, age, idle, dropped)


def _links(views: list[WorkerView], coordinator: Coordinator) -> Iterator[Metric]:
    labels = ("source", "destination")
    messages = CounterMetricFamily("moestro:link_messages", "Messages from a worker to another.", labels=labels)
    num_bytes = CounterMetricFamily("moestro:link_bytes", "Bytes of messages from a worker to another.", labels=labels)
    for view in views:
        assert view.figures is not None, "views without figures are left out"
        for worker, (num_sent, sent) in enumerate(zip(view.figures.num_sent, view.figures.sent_bytes, strict=True)):
            if num_sent:
                link = (view.name, str(coordinator.name(worker)))
                messages.add_metric(link, num_sent)
                num_bytes.add_metric(link, sent)
    yield from (messages, num_bytes)
    yield from _two_phase(views, coordinator)


def _two_phase(views: list[WorkerView], coordinator: Coordinator) -> Iterator[Metric]:
    labels = ("source", "destination")
    messages = CounterMetricFamily(
        "moestro:link_two_phase_messages",
        "Those messages whose tensors followed on a channel of their own.",
        labels=labels,
    )
    num_bytes = CounterMetricFamily(
        "moestro:link_two_phase_bytes",
        "Bytes of messages whose tensors followed on a channel of their own.",
        labels=labels,
    )
    for view in views:
        assert view.figures is not None, "views without figures are left out"
        totals = zip(view.figures.num_two_phase, view.figures.two_phase_bytes, strict=True)
        for worker, (num_sent, sent) in enumerate(totals):
            if num_sent:
                link = (view.name, str(coordinator.name(worker)))
                messages.add_metric(link, num_sent)
                num_bytes.add_metric(link, sent)
    yield from (messages, num_bytes)


def _pace(views: list[WorkerView]) -> Iterator[Metric]:
    """Yield what paced workers count; the names are those of an engine's figures, for workers."""
    figures = [(view.name, view.figures.pace) for view in views if view.figures is not None]
    paced = [(name, pace) for name, pace in figures if pace is not None]
    if not paced:
        return
    for field in PaceCounts.__struct_fields__:
        spec = FIGURES[field]
        make = GaugeMetricFamily if spec.kind is FigureKind.GAUGE else CounterMetricFamily
        family = make(f"moestro:worker_{spec.metric}", spec.help, labels=_WORKER)
        for name, pace in paced:
            family.add_metric((name,), spec.metric_value(getattr(pace, field)))
        yield family


@dataclass(frozen=True, slots=True)
class _WorkerTotals:
    """Totals of one worker's process at one moment."""

    launch: int
    idle_ns: int
    lived_ns: int
    num_sent: int
    sent_bytes: int


class GroupLines:
    """Reports what a group's workers did since the last report.

    Args:
        coordinator: Has the workers' figures.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._before: dict[str, _WorkerTotals] = {}

    def lines(self, seconds: float) -> list[str]:
        """Return one line for each worker that has sent messages in the last `seconds`."""
        before, self._before, lines = self._before, {}, []
        for view in self._coordinator.views():
            figures = view.figures
            if figures is None:
                continue
            now = _WorkerTotals(
                view.launch, figures.idle_ns, figures.lived_ns, sum(figures.num_sent), sum(figures.sent_bytes)
            )
            self._before[view.name] = now
            old = before.get(view.name)
            if old is None or old.launch != now.launch:
                old = _WorkerTotals(now.launch, 0, 0, 0, 0)
            if now.num_sent > old.num_sent:
                lines.append(_line(view, old, now, seconds))
        return lines


def _line(view: WorkerView, old: _WorkerTotals, now: _WorkerTotals, seconds: float) -> str:
    figures = view.figures
    assert figures is not None, "views without figures are left out"
    oldest_ns = max(figures.oldest_ns)
    layer = figures.oldest_ns.index(oldest_ns)
    where = f", the oldest for {oldest_ns / 1e6:.1f} ms in layer {layer}" if oldest_ns else ""
    idle_share = (now.idle_ns - old.idle_ns) / (now.lived_ns - old.lived_ns)
    return (
        f"{view.name}: queued {sum(figures.num_waiting)}{where}; stalled {idle_share:.0%};"
        f" sent {(now.num_sent - old.num_sent) / seconds:.0f} messages/s,"
        f" {(now.sent_bytes - old.sent_bytes) / seconds / 1e6:.2f} MB/s"
    )
