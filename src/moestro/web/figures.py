"""Figures of a server or router: histograms, the text that Prometheus scrapes, and the answer of GET /statistics.

The page at `/` reads the latter. Totals count from the start of the process. The page computes rates and percentiles
from the differences of two answers.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric, Sample
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from moestro import __version__
from moestro.core.load_figures import LoadFigures
from moestro.web.errors import HttpError
from moestro.web.page import PAGE_HEADERS, PAGE_PATHS, Plane, Program, page_file

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts observations by bucket.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; one more bucket lies above the last.
        counts: Number of observations in each bucket, not cumulated.
        total: Sum of the observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation. Takes less than 1 µs."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Return the observations of all `histograms`, which must have the same bounds."""
    first, *others = histograms
    merged = Histogram(first.bounds)
    merged.counts = [sum(counts) for counts in zip(first.counts, *(other.counts for other in others), strict=True)]
    merged.total = sum((other.total for other in others), first.total)
    return merged


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return each bucket's upper bound as Prometheus writes it, and the number of observations at most as large."""
    names = (*map(str, histogram.bounds), "+Inf")
    return [(name, float(count)) for name, count in zip(names, accumulate(histogram.counts), strict=True)]


class Exposition:
    """Writes `GET /metrics`: the metrics of some collectors and of this process, collected at every scrape.

    The text is that of `prometheus_client.generate_latest`, which writes the names and labels of thousands of lines
    again each time, while the event loop serves no client. Here they are kept for the next scrape.
    """

    def __init__(self, *collectors: Collector) -> None:
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        # By name and values of labels: what comes before the value, of the lines of the last scrape.
        self._series: dict[tuple[str, ...], str] = {}

    def text(self) -> bytes:
        """Return all metrics with their present values."""
        before, kept, lines = self._series, dict[tuple[str, ...], str](), list[str]()
        for metric in self._registry.collect():
            lines.append(_declaration(metric))
            for sample in metric.samples:
                key = (sample.name, *sample.labels.values())
                series = kept[key] = before.get(key) or _series(sample)
                value = sample.value
                is_short = -_LEAST_EXPONENT < value < _LEAST_EXPONENT
                lines.append(f"{series} {repr(float(value)) if is_short else _go_number(value)}\n")
        self._series = kept
        return "".join(lines).encode()


_LEAST_EXPONENT = 1e6  # from which on a number is written with an exponent, as Go does
_go_number: Callable[[float], str] = floatToGoString


def _declaration(metric: Metric) -> str:
    """Write the lines before the samples of a metric."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.type}\n"


def _series(sample: Sample) -> str:
    """Write a sample's name and labels."""
    escaped = (
        (name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in sorted(sample.labels.items())
    )
    labels = ",".join(f'{name}="{value}"' for name, value in escaped)
    return f"{sample.name}{{{labels}}}" if labels else sample.name


class Durations(msgspec.Struct, frozen=True):
    """Observed durations, counted in buckets.

    Attributes:
        bounds: Upper bounds of the buckets, in seconds; one more bucket lies above the last.
        counts: Number of durations in each bucket.
    """

    bounds: Sequence[float]
    counts: Sequence[int]

    @classmethod
    def of(cls, histograms: Iterable[Histogram]) -> Durations | None:
        """Return the durations of all `histograms` together; None without a histogram."""
        found = list(histograms)
        if not found:
            return None
        merged = merge(found)
        return cls(merged.bounds, merged.counts)


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine. None means unknown.

    Attributes:
        condition: `up`, or why the engine gets no requests.
        breaker: State of the circuit breaker; None means that there is none.
        num_in_flight: Requests sent to the engine and not ended.
        num_requests: Requests ended by the engine (serve), or given to it (route).
        num_prompt_tokens: Prompt tokens of requests with a first output (serve), or of answers with usage (route).
        num_cached_tokens: Those of them that came from the engine's prefix cache.
        num_generated_tokens: Tokens received from the engine (serve), or that it reports (route).
        prompt_token_s: Mean time to compute a prompt token, seconds.
        load: Last load figures. Of a router they have the engine's own counts of prefix hits too.
    """

    name: str
    condition: str
    breaker: str | None
    num_in_flight: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int | None
    prompt_token_s: float | None = None
    load: LoadFigures


class ExpertHeat(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the experts by the tokens of all engines, in the window of recent steps.

    Attributes:
        layers: Numbers of the layers with experts.
        tokens: Visits per step to a layer's mean expert, by layer.
        relative: Load of each expert over the mean of its layer, [layers][experts].
        num_steps: Sum of the weights of the window's steps.
    """

    layers: list[int]
    tokens: list[float]
    relative: list[list[float]]
    num_steps: float


class LiveStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a server or router at one moment.

    Attributes:
        policy: Route policy.
        mode: Mode in which engines compute; None for a router.
        time_s: Time of the figures on a monotonic clock, in seconds.
        num_requests: Requests that are being answered.
        num_refused: Requests refused.
        num_client_errors: Requests that clients must change: refused ones, and of a router those that engines refused.
        num_overload: Requests for which there was no room, counted alike.
        num_retried: Retries on another engine (route), or requests that moved when an engine ended (serve).
        first_token_s: TTFT, or of a router the time to the first byte.
        gap_s: ITL; None for a router.
        clients_port, operators_port: Ports of both planes; None means that there is none, or that it is unknown.
        has_experts: Whether the model has experts whose load can be queried.
        experts: Load of the experts, if requested; None means that nothing was counted.
    """

    program: Program
    version: str = __version__
    policy: str
    mode: str | None
    time_s: float
    num_requests: int
    num_refused: int
    num_client_errors: int
    num_overload: int
    num_retried: int
    first_token_s: Durations | None
    gap_s: Durations | None
    clients_port: int | None
    operators_port: int | None
    engines: list[EngineStatistics]
    has_experts: bool = False
    experts: ExpertHeat | None = None


# Handlers that aiohttp's servers share for the page at `/`: its files, and the data that it asks for.

_DEFAULT_LIMIT, _MOST = 50, 1000


def page_routes(
    program: Program, plane: Plane, read: Callable[[bool], LiveStatistics | Awaitable[LiveStatistics]]
) -> list[web.RouteDef]:
    """Return the routes of the page's files and of /statistics.

    Args:
        program: Program that serves the page.
        plane: Port that serves the page.
        read: Callable that returns the present figures, with the load of experts if its argument is true.
    """

    async def files(http: web.Request) -> web.Response:
        """Handle GET / and /page/{name}: return a file of the page."""
        if http.path not in PAGE_PATHS:
            raise HttpError(404, "The page has no such file.", "not_found")
        file = page_file(http.path, program, plane)
        return web.Response(body=file.body, headers={"Content-Type": file.content_type, **PAGE_HEADERS})

    async def statistics(http: web.Request) -> web.Response:
        """Handle GET /statistics: return the present figures, with ?experts=true also the load of experts."""
        experts = http.query.get("experts", "false")
        if experts not in {"true", "false"}:
            raise HttpError(400, "experts must be true or false.", "bad_request")
        found = read(experts == "true")
        if inspect.isawaitable(found):
            found = await found
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    return [web.get("/", files), web.get("/page/{name}", files), web.get("/statistics", statistics)]


def limit_in(query: Mapping[str, str]) -> int:
    """Return the number of entries that `?limit=N` asks for, 1 to 1,000; 50 without it.

    Raises:
        HttpError: It is no such number.
    """
    text = query.get("limit", str(_DEFAULT_LIMIT))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
    if not is_number or not 1 <= int(text) <= _MOST:
        raise HttpError(400, f"limit must be a number from 1 to {_MOST}.", "bad_request")
    return int(text)
