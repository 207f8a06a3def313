"""The line that an operator sees every ten seconds while there is traffic."""

from __future__ import annotations

from dataclasses import dataclass

from moestro.core.request import ServiceClass
from moestro.server.engine_client import EngineClient
from moestro.server.metrics import EngineMetrics, Metrics
from moestro.wire.messages import RankLoad


@dataclass(frozen=True, slots=True)
class _Sum:
    """Observations of one histogram."""

    num: int
    seconds: float

    def since(self, old: _Sum) -> _Sum:
        """Those that came after `old`."""
        return _Sum(self.num - old.num, self.seconds - old.seconds)


@dataclass(frozen=True, slots=True)
class _Totals:
    """One engine's, at one moment."""

    num_prompt: int
    num_generated: int
    num_queried: int
    num_hit: int
    num_passes: int
    passed_over_ns: int
    latencies: dict[tuple[ServiceClass, str], _Sum]  # by class, and by name in the line


class StatLines:
    """Says what the engines did since it was asked last, and how full they are."""

    def __init__(self, engines: EngineClient, metrics: Metrics) -> None:
        self._engines = engines
        self._metrics = metrics
        self._before = self._totals()

    def lines(self, seconds: float) -> list[str]:
        """One line for each engine that has, or had, anything to do in the last `seconds`."""
        before, self._before = self._before, self._totals()
        return [
            _line(engine, load, _since(old, new), seconds)
            for engine, (load, old, new) in enumerate(zip(self._engines.loads, before, self._before, strict=True))
            if load.num_running or load.num_waiting or old != new
        ]

    def _totals(self) -> list[_Totals]:
        return [_totals_of(m, load) for m, load in zip(self._metrics.engines, self._engines.loads, strict=True)]


def _totals_of(metrics: EngineMetrics, load: RankLoad) -> _Totals:
    figures = {"queue": metrics.queue_s, "TTFT": metrics.first_token_s, "TPOT": metrics.mean_gap_s}
    return _Totals(
        num_prompt=metrics.num_prompt_tokens,
        num_generated=metrics.num_generated_tokens,
        num_queried=load.num_queried_tokens,
        num_hit=load.num_hit_tokens,
        num_passes=load.pass_counts.num_passes,
        passed_over_ns=load.pass_counts.passed_over_ns,
        latencies={
            (service_class, name): _Sum(sum(histogram.counts), histogram.total)
            for name, by_class in figures.items()
            for service_class, histogram in by_class.items()
        },
    )


def _since(old: _Totals, new: _Totals) -> _Totals:
    """The difference; a rank that was started again counts from 0."""
    is_new_rank = new.num_queried < old.num_queried or new.num_passes < old.num_passes
    return _Totals(
        new.num_prompt - old.num_prompt,
        new.num_generated - old.num_generated,
        new.num_queried - (0 if is_new_rank else old.num_queried),
        new.num_hit - (0 if is_new_rank else old.num_hit),
        new.num_passes - (0 if is_new_rank else old.num_passes),
        new.passed_over_ns - (0 if is_new_rank else old.passed_over_ns),
        {key: latency.since(old.latencies[key]) for key, latency in new.latencies.items()},
    )


def _line(engine: int, load: RankLoad, gained: _Totals, seconds: float) -> str:
    latencies = "".join(_class_part(each, gained.latencies) for each in ServiceClass)
    passes = f"; {gained.num_passes} passes in {_time(gained.passed_over_ns / 1e9)}" if gained.num_passes else ""
    hits = f", prefix hits {gained.num_hit / gained.num_queried:.0%}" if gained.num_queried else ""
    return (
        f"engine {engine}: running {load.num_running}, waiting {load.num_waiting}, KV {load.kv_usage:.1%}{hits},"
        f" tokens/s in {gained.num_prompt / seconds:.1f}, out {gained.num_generated / seconds:.1f}"
        f"{latencies}{passes}"
    )


def _class_part(service_class: ServiceClass, latencies: dict[tuple[ServiceClass, str], _Sum]) -> str:
    """Means of the requests of one class; "" if there were none."""
    own = {name: latency for (each, name), latency in latencies.items() if each == service_class and latency.num}
    means = [f"{name} {_time(latency.seconds / latency.num)}" for name, latency in own.items()]
    return f"; {service_class} {', '.join(means)}" if means else ""


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
