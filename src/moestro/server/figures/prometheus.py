"""Metrics of the API server for Prometheus, under Moestro's names and under vLLM's, which dashboards expect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_table import DISTANCES, SAME_DEVICE
from moestro.core.load_figures import FIGURES, FigureKind, PaceCounts, figure_values
from moestro.core.processes import WorkerKind
from moestro.core.request import FinishReason, ModelInfo
from moestro.placement.live.control import DecisionOutcome, MigrationOutcome, PlacementControl
from moestro.placement.score import PlaceScore
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.server.engines.request_state import ByClass, EngineMetrics, Metrics
from moestro.server.experts.coordinator import Coordinator, WorkerView
from moestro.server.experts.expert_signals import ExpertSignals
from moestro.server.experts.placement_views import found_s, predicted_s
from moestro.web.figures import Histogram, buckets, merge
from moestro.web.ports.faults import Faults

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


def placement_metrics(
    control: PlacementControl, model_name: str, now_ns: Callable[[], int] = time.monotonic_ns
) -> Iterator[Metric]:
    """Yield the metrics of live placement with their present values."""
    change = None if control.applied is None else control.applied.change
    now = None if control.measured is None else control.measured.score
    text = (
        "Mean load of the workers over the largest under the present placement; ratio_of_sums as vLLM defines it,"
        " mean_of_ratios as SGLang does."
    )
    yield _balance("moestro:placement_balance", text, now, model_name)
    text = "Balance that the last completed plan predicted, by the definitions of placement_balance."
    yield _balance("moestro:placement_balance_predicted", text, None if change is None else change.after, model_name)
    yield from _payback(control, model_name)
    gauges: dict[str, tuple[str, float]] = {
        "table_version": ("Version of the table of experts that the group serves.", control.migration.table.version),
        "frozen": ("1 while an operator lets no migration start.", control.is_frozen),
        "migrating": ("1 while experts move.", control.migration.progress.is_running),
        "stalled": ("1 while a migration or a planning policy stands still.", bool(control.stall)),
    }
    if control.plan is not None:
        age_s = (now_ns() - control.plan_ns) / NS_PER_S
        gauges["plan_age_seconds"] = ("Age of the last plan of a placement policy.", age_s)
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"moestro:placement_{name}", text, labels=("model_name",))
        gauge.add_metric((model_name,), float(value))
        yield gauge
    for name, text, count in (
        ("moved_bytes", "Bytes of weights that moved.", control.moved_bytes),
        ("stalls", "Times at which a migration or a planning policy began to stand still.", control.num_stalls),
    ):
        counter = CounterMetricFamily(f"moestro:placement_{name}", text, labels=("model_name",))
        counter.add_metric((model_name,), count)
        yield counter
    outcomes = {outcome.value: control.num_migrations[outcome] for outcome in MigrationOutcome}
    yield _by_outcome("moestro:placement_migrations", "Migrations that ended, by outcome.", outcomes, model_name)
    outcomes = {outcome.value: control.num_decisions[outcome] for outcome in DecisionOutcome}
    yield _by_outcome("moestro:placement_decisions", "Decisions about the placement, by outcome.", outcomes, model_name)


def _balance(name: str, text: str, score: PlaceScore | None, model_name: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model_name", "definition"))
    if score is not None:
        family.add_metric((model_name, "ratio_of_sums"), score.balance_of_sums)
        family.add_metric((model_name, "mean_of_ratios"), score.mean_balance)
    return family


def _payback(control: PlacementControl, model_name: str) -> Iterator[Metric]:
    """Yield what the last completed plan saves, and after how many steps its move has paid."""
    labels = ("model_name", "kind")
    saved = GaugeMetricFamily(
        "moestro:placement_saved_seconds_per_step",
        "Seconds per step that the last completed plan saves by the traffic model: predicted when it was made, found"
        " under the load since.",
        labels=labels,
    )
    steps = GaugeMetricFamily(
        "moestro:placement_payback_steps",
        "Steps after which the move of the last completed plan has paid; absent for never.",
        labels=labels,
    )
    for kind, saved_s in (("predicted", predicted_s(control)), ("found", found_s(control))):
        if saved_s is not None and control.applied is not None:
            saved.add_metric((model_name, kind), saved_s)
            if saved_s > 0:
                steps.add_metric((model_name, kind), control.applied.move_s / saved_s)
    yield from (saved, steps)


def _by_outcome(name: str, text: str, counts: Mapping[str, int], model_name: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=("model_name", "outcome"))
    for outcome, count in counts.items():
        family.add_metric((model_name, outcome), count)
    return family


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
        "moestro:expert_balance_min",
        "Mean load of a layer's experts over the largest, of the least even layer.",
        labels=("model_name",),
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


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the metrics.

    Attributes:
        model_name: Label by which vLLM's dashboards select.
        mode: Mode in which the engines compute.
        groups: Number of each engine's group. Engines of a group compute, and restart, together.
        num_dropped: Callable that returns the number of messages that were invalid or from unknown processes.
        num_refused: Callable that returns the number of connections without the keys of this server.
        num_unrecorded: Callable that returns the number of requests that `--record` has lost.
        faults: Faults of clients' connections.
        coordinator: The group of workers in `async` mode.
        signals: Figures of the experts of a group. None means that each engine holds the whole network.
        placement: State of live placement; None where no experts can move.
    """

    model_name: str
    info: ModelInfo
    engines: EngineClient
    metrics: Metrics
    mode: str
    groups: Sequence[int]
    num_dropped: Callable[[], int]
    num_refused: Callable[[], int]
    num_unrecorded: Callable[[], int]
    faults: Faults
    coordinator: Coordinator | None = None
    signals: ExpertSignals | None = None
    placement: PlacementControl | None = None


_COUNTERS: tuple[tuple[str, str, Callable[[EngineMetrics], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of requests with a first output.", lambda m: m.num_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda m: m.num_generated_tokens),
    ("prompt_tokens_cached", "Prompt tokens that came from a cache.", lambda m: m.num_cached_tokens),
    (
        "corrupted_requests",
        "Requests that ended because their logits were not finite.",
        lambda m: m.ended[FinishReason.NON_FINITE],
    ),
)
_CLASS_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], ByClass]], ...] = (
    ("time_to_first_token_seconds", "Time from a request's arrival to its first token.", lambda m: m.first_token_s),
    (
        "request_time_per_output_token_seconds",
        "Mean gap between tokens of each finished request.",
        lambda m: m.mean_gap_s,
    ),
    ("request_queue_time_seconds", "Time from a request's arrival to its first admission.", lambda m: m.queue_s),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], Histogram]], ...] = (
    ("inter_token_latency_seconds", "Gap between two tokens of a request.", lambda m: m.gap_s),
    (
        "e2e_request_latency_seconds",
        "Time from arrival to the last token of each finished request.",
        lambda m: m.whole_s,
    ),
    ("request_prefill_time_seconds", "Time from admission to the first token.", lambda m: m.prefill_s),
    (
        "request_decode_time_seconds",
        "Time from the first to the last token of each finished request.",
        lambda m: m.decode_s,
    ),
    ("request_prompt_tokens", "Prompt tokens of each finished request.", lambda m: m.prompt_tokens),
    ("request_generation_tokens", "Generated tokens of each finished request.", lambda m: m.generation_tokens),
    ("request_inference_time_seconds", "Time from admission to the last token.", lambda m: m.inference_s),
    (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of each finished request that no cache had.",
        lambda m: m.computed_tokens,
    ),
    ("request_params_max_tokens", "Limit of generated tokens of each finished request.", lambda m: m.max_tokens),
    (
        "iteration_tokens_total",
        "Tokens of each step with an output: those generated, and the prompts that it completed.",
        lambda m: m.step_tokens,
    ),
    ("request_num_preemptions", "Preemptions of each finished request.", lambda m: m.num_preemptions),
    ("request_params_n", "Number of choices of each finished prompt.", lambda m: m.num_choices),
    (
        "request_max_num_generation_tokens",
        "Generated tokens of the longest choice of each finished prompt.",
        lambda m: m.longest_choice,
    ),
)
# Sources of prompt tokens by vLLM's names.
_SOURCES: tuple[tuple[str, Callable[[EngineMetrics], float]], ...] = (
    ("local_compute", lambda m: m.num_prompt_tokens - m.num_cached_tokens),
    ("local_cache_hit", lambda m: m.num_cached_tokens - m.num_host_tokens),
    ("external_kv_transfer", lambda m: m.num_host_tokens),
)
# vLLM's reasons of requests that wait. Nothing but a lack of capacity makes a request wait here.
_WAITING_REASONS = ("capacity", "deferred")
_QUEUE_FULL = "queue_full"  # Code of the refusal that vLLM counts as a rejection.
_OWN_COUNTERS: tuple[tuple[str, str, Callable[[EngineMetrics], float]], ...] = (
    ("engine_restarts", "Restarts of the engine's process.", lambda m: m.num_restarts),
    ("engine_stalls", "Stalls of the engine: it has requests and makes no step.", lambda m: m.num_stalls),
    ("requests_moved", "Requests that moved to another engine when the engine's process ended.", lambda m: m.num_moved),
    ("streams_resumed", "Moved requests whose stream had begun.", lambda m: m.num_streams_resumed),
)
_LABELS = ("model_name", "engine")


class ServerCollector(Collector):
    """Collects the API server's metrics at every scrape."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._label_values = [(sources.model_name, str(i)) for i in range(len(sources.metrics.engines))]

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values."""
        for prefix in ("moestro", "vllm"):
            yield from self._shared(prefix)
        yield from self._own()
        if self._sources.info.num_experts:
            yield from expert_metrics(self._sources.engines.expert_loads, self._sources.model_name)
        if self._sources.signals is not None:
            yield from signal_metrics(self._sources.signals, self._sources.model_name)
        if self._sources.coordinator is not None:
            yield from group_metrics(self._sources.coordinator)
        if self._sources.placement is not None:
            yield from placement_metrics(self._sources.placement, self._sources.model_name)

    def _shared(self, prefix: str) -> Iterator[Metric]:
        """Yield the metrics that vLLM has too, by the same names; under its prefix also by the same labels."""
        engines = self._sources.metrics.engines
        yield from self._load_figures(prefix, FigureKind.GAUGE, has_vllm_name=True)
        yield from self._load_figures(prefix, FigureKind.COUNTER, has_vllm_name=True)
        for name, text, of_engine in _COUNTERS:
            yield self._counter(f"{prefix}:{name}", text, map(of_engine, engines))
        for name, text, by_class_of in _CLASS_HISTOGRAMS:
            if prefix == "vllm":  # vLLM's dashboards expect one series for each engine.
                merged = (merge(by_class_of(engine).values()) for engine in engines)
                yield self._histogram(f"{prefix}:{name}", text, merged)
            else:
                yield self._histogram_by_class(f"{prefix}:{name}", text, map(by_class_of, engines))
        for name, text, histogram_of in _HISTOGRAMS:
            yield self._histogram(f"{prefix}:{name}", text, map(histogram_of, engines))
        yield self._by_source(f"{prefix}:prompt_tokens_by_source")
        yield self._waiting(f"{prefix}:num_requests_waiting_by_reason")
        yield self._rejections(f"{prefix}:admission_rejections")
        yield self._ended(f"{prefix}:request_success")
        yield self._cache_config(f"{prefix}:cache_config_info")

    def _own(self) -> Iterator[Metric]:
        sources = self._sources
        for name, text, of_engine in _OWN_COUNTERS:
            yield self._counter(f"moestro:{name}", text, map(of_engine, sources.metrics.engines))
        yield from self._load_figures("moestro", FigureKind.COUNTER, has_vllm_name=False)
        yield from self._load_figures("moestro", FigureKind.GAUGE, has_vllm_name=False)
        up = [float(sources.engines.is_routable(i)) for i in range(len(self._label_values))]
        yield self._gauge("moestro:engine_ready", "1 while the engine takes requests.", up)
        yield self._engine_info("moestro:engine_info")
        refused = CounterMetricFamily("moestro:requests_refused", "Requests refused, by reason.", labels=("reason",))
        for reason, count in sorted(sources.metrics.refusals.items()):
            refused.add_metric((reason,), count)
        yield refused
        yield sources.faults.family("moestro:connection_faults")
        text = "Messages that could not be read, or came from unknown processes."
        yield CounterMetricFamily("moestro:messages_dropped", text, value=sources.num_dropped())
        text = "Connections to the API server's port for workers without the keys of this start."
        yield CounterMetricFamily("moestro:worker_connections_refused", text, value=sources.num_refused())
        text = "Messages of engines that the server failed to process; the affected requests end with an error."
        yield CounterMetricFamily("moestro:delivery_errors", text, value=sources.metrics.num_delivery_errors)
        text = "Lines that --record could not write."
        yield CounterMetricFamily("moestro:record_lines_lost", text, value=sources.num_unrecorded())

    def _load_figures(self, prefix: str, kind: FigureKind, *, has_vllm_name: bool) -> Iterator[Metric]:
        """Yield the figures that ranks report, with or without a counterpart of the same name in vLLM.

        `expert_metrics` yields those that the API server computes, which are absent where they are unknown.
        """
        make = self._gauge if kind is FigureKind.GAUGE else self._counter
        loads = [figure_values(load) for load in self._sources.engines.loads]
        for figure, spec in FIGURES.items():
            is_wanted = spec.kind is kind and spec.has_vllm_name is has_vllm_name
            if spec.metric is not None and spec.is_from_rank and is_wanted:
                yield make(f"{prefix}:{spec.metric}", spec.help, [spec.metric_value(load[figure]) for load in loads])

    def _gauge(self, name: str, text: str, values: Iterable[float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for labels, value in zip(self._label_values, values, strict=True):
            family.add_metric(labels, value)
        return family

    def _counter(self, name: str, text: str, values: Iterable[float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for labels, value in zip(self._label_values, values, strict=True):
            family.add_metric(labels, value)
        return family

    def _histogram(self, name: str, text: str, histograms: Iterable[Histogram]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        for labels, histogram in zip(self._label_values, histograms, strict=True):
            family.add_metric(labels, buckets(histogram), histogram.total)
        return family

    def _histogram_by_class(self, name: str, text: str, by_classes: Iterable[ByClass]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=(*_LABELS, "service_class"))
        for labels, by_class in zip(self._label_values, by_classes, strict=True):
            for service_class, histogram in by_class.items():
                family.add_metric((*labels, service_class), buckets(histogram), histogram.total)
        return family

    def _by_source(self, name: str) -> Metric:
        family = CounterMetricFamily(name, "Prompt tokens by source.", labels=(*_LABELS, "source"))
        for labels, metrics in zip(self._label_values, self._sources.metrics.engines, strict=True):
            for source, of_engine in _SOURCES:
                family.add_metric((*labels, source), of_engine(metrics))
        return family

    def _waiting(self, name: str) -> Metric:
        family = GaugeMetricFamily(name, "Waiting requests by reason.", labels=(*_LABELS, "reason"))
        for labels, load in zip(self._label_values, self._sources.engines.loads, strict=True):
            for reason in _WAITING_REASONS:
                num_waiting = load.num_waiting or 0 if reason == _WAITING_REASONS[0] else 0
                family.add_metric((*labels, reason), num_waiting)
        return family

    def _rejections(self, name: str) -> Metric:
        text = "Requests refused because the queues of all engines were full."
        family = CounterMetricFamily(name, text, labels=("model_name", "reason"))
        num_full = self._sources.metrics.refusals[_QUEUE_FULL]
        family.add_metric((self._sources.model_name, "max_num_queued_reqs"), num_full)
        return family

    def _ended(self, name: str) -> Metric:
        family = CounterMetricFamily(name, "Requests that ended, by reason.", labels=(*_LABELS, "finished_reason"))
        for labels, metrics in zip(self._label_values, self._sources.metrics.engines, strict=True):
            for reason in FinishReason:
                family.add_metric((*labels, reason), metrics.ended[reason])
        return family

    def _engine_info(self, name: str) -> Metric:
        family = GaugeMetricFamily(name, "Mode of the engine, and its group.", labels=(*_LABELS, "mode", "group"))
        for labels, group in zip(self._label_values, self._sources.groups, strict=True):
            family.add_metric((*labels, self._sources.mode, str(group)), 1)
        return family

    def _cache_config(self, name: str) -> Metric:
        info = self._sources.info
        sizes = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "num_cpu_blocks": info.num_host_blocks,
        }
        family = GaugeMetricFamily(name, "Size of the KV cache.", labels=(*_LABELS, *sizes))
        for labels in self._label_values:
            family.add_metric((*labels, *map(str, sizes.values())), 1)
        return family
