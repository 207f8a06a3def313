"""The figures of `moestro serve` for the page at `/` and for the log, and the banner of its start."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moestro import __version__
from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.load_figures import FIGURES, FigureKind, LoadFigures, PaceCounts, figure_values
from moestro.core.request import CardMemory, ModelInfo, ServiceClass
from moestro.server.api.request_builder import ServedModel
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.engine_reports import GroupLoad
from moestro.server.engines.request_state import EngineMetrics, Metrics, Traffic
from moestro.server.experts.coordinator import Coordinator
from moestro.web.banner import Banner, curl_line
from moestro.web.figures import Durations, EngineStatistics, ExpertHeat, LiveStatistics, merge
from moestro.wire.messages import Phase

logger = logging.getLogger(__name__)


_DIGITS = 3  # of an expert's load relative to its layer


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Reads the figures from the API server's own state, without waiting for an engine.

    Attributes:
        listener: Socket of the clients' port.
    """

    settings: ServeSettings
    engines: EngineClient
    metrics: Metrics
    traffic: Traffic
    info: ModelInfo
    listener: socket.socket

    def read(self, with_experts: bool) -> LiveStatistics:  # noqa: FBT001 - the only argument
        """Return the present figures. The load of experts is the one that an earlier call requested."""
        now_ns, metrics, routing = time.monotonic_ns(), self.metrics, self.settings.routing
        has_experts, experts = self.info.num_experts > 0, None
        if with_experts and has_experts:
            self.engines.expert_loads.refresh(now_ns)
            merged = self.engines.expert_loads.merged()
            experts = None if merged is None else _heat(merged)
        return LiveStatistics(
            program="serve",
            policy=routing.route_score or routing.route_policy,
            mode=self.settings.stepping.mode,
            time_s=now_ns / NS_PER_S,
            num_requests=self.traffic.num_answering,
            num_refused=metrics.refusals.total(),
            num_client_errors=metrics.refusals.num_client_errors,
            num_overload=metrics.refusals.num_overload,
            num_retried=sum(each.num_moved for each in metrics.engines),
            first_token_s=Durations.of(merge(each.first_token_s.values()) for each in metrics.engines),
            gap_s=Durations.of(each.gap_s for each in metrics.engines),
            clients_port=self.listener.getsockname()[1],
            operators_port=self.settings.server.admin_port,
            engines=[self._engine(engine) for engine in range(len(metrics.engines))],
            has_experts=has_experts,
            experts=experts,
        )

    def _engine(self, engine: int) -> EngineStatistics:
        own = self.metrics.engines[engine]
        return EngineStatistics(
            name=f"engine {engine}",
            condition="up" if self.engines.is_routable(engine) else "down",
            breaker=None,
            num_in_flight=self.engines.num_in_flight_on(engine),
            num_requests=sum(own.ended.values()),
            num_prompt_tokens=own.num_prompt_tokens,
            num_cached_tokens=own.num_cached_tokens,
            num_generated_tokens=own.num_generated_tokens,
            prompt_token_s=own.prefill_s.total / own.computed_tokens.total if own.computed_tokens.total else None,
            load=self.engines.loads[engine],
        )


def _heat(merged: GroupLoad) -> ExpertHeat:
    total = merged.load.total
    mean = total.mean(axis=1)
    relative = np.divide(total, mean[:, None], out=np.zeros_like(total), where=mean[:, None] > 0)
    return ExpertHeat(
        layers=merged.layers.tolist(),
        tokens=mean.tolist(),
        relative=np.round(relative, _DIGITS).tolist(),
        num_steps=float(merged.load.num_steps),
    )


@dataclass(frozen=True, slots=True)
class _Sum:
    """Number and sum of one histogram's observations."""

    num: int
    seconds: float

    def since(self, old: _Sum) -> _Sum:
        """Return the observations that came after `old`."""
        return _Sum(self.num - old.num, self.seconds - old.seconds)


@dataclass(frozen=True, slots=True)
class _EngineTotals:
    """Totals of one engine at one moment.

    Attributes:
        num_prompt, num_generated: Number of prompt tokens and of generated tokens.
        counters: Counters of the engine's current process, by name.
        latencies: Latencies by service class and name in the line.
    """

    num_prompt: int
    num_generated: int
    counters: dict[str, float]
    latencies: dict[tuple[ServiceClass, str], _Sum]


class StatLines:
    """Reports the engines' work since the last report, and their load."""

    def __init__(self, engines: EngineClient, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._before = self._totals()

    def lines(self, seconds: float) -> list[str]:
        """Return one line for each engine that has requests, or had any in the last `seconds`."""
        before, self._before = self._before, self._totals()
        return [
            _line(engine, load, _since(old, new), seconds)
            for engine, (load, old, new) in enumerate(zip(self._engines.loads, before, self._before, strict=True))
            if load.num_running or load.num_waiting or old != new
        ]

    def _totals(self) -> list[_EngineTotals]:
        return [_totals_of(m, load) for m, load in zip(self._metrics.engines, self._engines.loads, strict=True)]


def _totals_of(metrics: EngineMetrics, load: LoadFigures) -> _EngineTotals:
    histograms = {"queue": metrics.queue_s, "TTFT": metrics.first_token_s, "TPOT": metrics.mean_gap_s}
    values = figure_values(load)
    return _EngineTotals(
        num_prompt=metrics.num_prompt_tokens,
        num_generated=metrics.num_generated_tokens,
        counters={name: values[name] for name, spec in FIGURES.items() if spec.kind is FigureKind.COUNTER},
        latencies={
            (service_class, name): _Sum(sum(histogram.counts), histogram.total)
            for name, by_class in histograms.items()
            for service_class, histogram in by_class.items()
        },
    )


def _since(old: _EngineTotals, new: _EngineTotals) -> _EngineTotals:
    """Return the difference of two totals; the counters of a restarted rank begin at 0."""
    is_new_rank = any(new.counters[name] < value for name, value in old.counters.items())
    return _EngineTotals(
        new.num_prompt - old.num_prompt,
        new.num_generated - old.num_generated,
        {name: value - (0 if is_new_rank else old.counters[name]) for name, value in new.counters.items()},
        {key: latency.since(old.latencies[key]) for key, latency in new.latencies.items()},
    )


def _line(engine: int, load: LoadFigures, gained: _EngineTotals, seconds: float) -> str:
    values, counters = figure_values(load), gained.counters
    shown = [spec.log_format.format(values[name]) for name, spec in FIGURES.items() if spec.log_format is not None]
    num_queried, num_hit, num_passes = (counters[n] for n in ("num_queried_tokens", "num_hit_tokens", "num_passes"))
    if num_queried:
        num_host = counters["num_host_hit_tokens"]
        from_host = f" and {num_host / num_queried:.0%} from host memory" if num_host else ""
        shown.append(f"prefix hits {num_hit / num_queried:.0%}{from_host}")
    passes = f"; {num_passes} passes in {_time(counters['passed_over_ns'] / 1e9)}" if num_passes else ""
    latencies = "".join(_class_part(each, gained.latencies) for each in ServiceClass)
    return (
        f"engine {engine}: {', '.join(shown)},"
        f" tokens/s in {gained.num_prompt / seconds:.1f}, out {gained.num_generated / seconds:.1f}"
        f"{latencies}{passes}"
    )


def _class_part(service_class: ServiceClass, latencies: dict[tuple[ServiceClass, str], _Sum]) -> str:
    """Return the mean latencies of one class; "" means that the class had no requests."""
    own = {name: latency for (each, name), latency in latencies.items() if each == service_class and latency.num}
    means = [f"{name} {_time(latency.seconds / latency.num)}" for name, latency in own.items()]
    return f"; {service_class} {', '.join(means)}" if means else ""


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


# Mean lateness of items, or of messages between workers, over the mean duration of items, above which a paced run is
# invalid: a device that is later stands for a slower one. Half of the 10 % by which paced and simulated may differ.
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
            gained = _pace_since(before.get(name), now)
            if not gained.num_items:
                continue
            if _late_share(gained) > MAX_LATE_SHARE:
                logger.warning(
                    "%s, above the %.0f%% of a valid run: raise --pace-dilation, or lower the load of this machine",
                    _pace_line(name, gained),
                    100 * MAX_LATE_SHARE,
                )
            else:
                lines.append(_pace_line(name, gained))
        return lines

    def _counts(self) -> Iterator[tuple[str, PaceCounts]]:
        for engine, load in enumerate(self._engines.loads):
            if load.pace is not None:
                yield f"engine {engine}", load.pace
        for view in () if self._coordinator is None else self._coordinator.views():
            if view.figures is not None and view.figures.pace is not None:
                yield view.name, view.figures.pace


def _pace_since(old: PaceCounts | None, now: PaceCounts) -> PaceCounts:
    """Return what came after `old`; the counts of a restarted process begin at 0."""
    if old is None or now.num_items < old.num_items:
        return now
    return PaceCounts(
        dilation=now.dilation,
        num_items=now.num_items - old.num_items,
        item_ns=now.item_ns - old.item_ns,
        late_ns=now.late_ns - old.late_ns,
        wait_ns=now.wait_ns - old.wait_ns,
        num_messages=now.num_messages - old.num_messages,
        message_late_ns=now.message_late_ns - old.message_late_ns,
    )


def _late_share(gained: PaceCounts) -> float:
    """Return the larger mean lateness, of items or of messages, over the mean duration of items."""
    item_ns, late_ns, message_late_ns = _means_ns(gained)
    worst_ns = max(late_ns, message_late_ns)
    return worst_ns / item_ns if item_ns else math.inf


def _means_ns(gained: PaceCounts) -> tuple[float, float, float]:
    """Return the mean duration and the mean lateness of an item, and the mean lateness of a message."""
    num_items, num_messages = gained.num_items, max(gained.num_messages, 1)
    return gained.item_ns / num_items, gained.late_ns / num_items, gained.message_late_ns / num_messages


def _pace_line(name: str, gained: PaceCounts) -> str:
    item_us, late_us, message_late_us = (mean_ns / 1e3 for mean_ns in _means_ns(gained))
    messages = f", {gained.num_messages} messages {message_late_us:.0f} us late" if gained.num_messages else ""
    return (
        f"{name}: paced, times dilated x {gained.dilation:g}; {gained.num_items} items of {item_us:.0f} us taken in"
        f" {late_us:.0f} us late{messages}: {_late_share(gained):.1%} of an item"
    )


_GIB = 1 << 30
_LEAST_SHOWN = _GIB // 20  # smaller parts would be shown as 0.0


def serve_banner(
    model: ServedModel, infos: Sequence[ModelInfo], phases: Sequence[Phase], url: str, *, needs_key: bool
) -> Banner:
    """Return the banner of a server that accepts requests.

    Args:
        infos: Model information, one per engine.
        phases: Consecutive phases from the start of the process until now.
    """
    info, count = infos[0], len(infos)
    tokens = sum(each.num_blocks * each.block_size for each in infos)
    gate = f", {info.num_experts} experts a layer, top-{info.num_experts_per_token}" if info.num_experts else ", dense"
    durations = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in phases)
    rows = [
        ("model", ", ".join(model.names)),
        ("network", f"{info.model_type}, {_human(info.num_parameters)} parameters, {info.num_layers} layers{gate}"),
        ("engines", f"{count} x {info.device}, {info.dtype}"),
        ("context", f"{info.max_model_len:,} tokens"),
        ("KV cache", f"{tokens:,} tokens: {tokens / info.max_model_len:.1f} sequences of the full context at once"),
        *(() if info.card is None else (("GPU memory", _card_text(info.card, count)),)),
        *zip(("tool calls", "reasoning"), map(": ".join, model.chat.choices), strict=False),
        ("ready in", f"{sum(phase.seconds for phase in phases):.1f} s ({durations})"),
        ("serving", f"{url} (OpenAI's API under /v1)"),
        ("page", f"{url}/ (a chat, engines, experts)"),
    ]
    body = {"model": model.names[0], "prompt": "def fibonacci(n):", "max_tokens": 48}
    return Banner(
        title=f"Moestro {__version__}",
        rows=rows,
        notes=info.notes,
        example=curl_line(url, body, needs_key=needs_key),
    )


def _card_text(card: CardMemory, num_engines: int) -> str:
    """List the uses of a card's memory, in GiB of each engine."""
    parts = [("weights", card.weight_bytes), ("peak of a step", card.step_bytes), ("graphs", card.graph_bytes)]
    parts += [("KV cache", card.kv_bytes), ("other", card.other_bytes)]
    listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts if size >= _LEAST_SHOWN)
    shared = "" if card.num_sharing == 1 else f", shared by {card.num_sharing} processes"
    each = "" if num_engines == 1 else "each "
    return f"{card.total_bytes / _GIB:.1f} GiB{shared}: {each}{listed}"


def _human(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
