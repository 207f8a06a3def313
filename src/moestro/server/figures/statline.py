"""The log line about each engine, written every ten seconds while there is traffic."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.core.load_figures import FIGURES, FigureKind, LoadFigures, figure_values
from moestro.core.request import ServiceClass
from moestro.server.engines.engine_client import EngineClient
from moestro.server.engines.metrics import EngineMetrics, Metrics


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
        shown.append(f"prefix hits {num_hit / num_queried:.0%}")
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
