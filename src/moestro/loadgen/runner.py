"""`moestro bench` from start to end: finds the model, makes the load, warms up, runs or searches, reports.

The result has the figures, and the conditions under which they hold.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from moestro.config.run_record import RunRecord, run_record
from moestro.errors import ConfigError, MoestroError
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.load import BenchLoad, Loads, fit, make_rows, run_load
from moestro.loadgen.settings import BenchSettings, EndpointSettings
from moestro.workload.progress import progress
from moestro.workload.run_records import (
    MAX_LATE_MS,
    Goodput,
    Records,
    Report,
    Slos,
    Spread,
    Verdict,
    find_highest,
    make_report,
    parse_slos,
)

# The result.

_HIDDEN = "***"


class BenchConditions(RunRecord, frozen=True, kw_only=True):
    """Conditions of a bench: those of the client's process, and the server that it measured.

    Attributes:
        pace_dilation: factor on the durations of a paced server. Rates and durations of the result are not corrected.
    """

    url: str
    model: str
    pace_dilation: float = 1.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One rate of a search."""

    rate: float
    verdict: Verdict
    report: Report


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search: the highest rate that held, the lowest above it that did not, and which side limited it."""

    rate: float | None
    above: float | None
    is_client_bound: bool
    slo_share: float


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole result. A search has `found` and `probes`, and the report of its best rate, if any."""

    conditions: BenchConditions
    settings: dict[str, object]
    num_skipped: int  # a trace's requests left out by --skip-too-long
    notes: tuple[str, ...] = ()  # what of a trace is not in its requests
    is_generated: bool = False  # whether a generator made the requests, rather than a trace
    report: Report | None
    found: Found | None = None
    probes: tuple[Probe, ...] = ()
    requests: dict[str, list[object]] | None = None


def make_conditions(endpoint: Endpoint) -> BenchConditions:
    """The conditions of this process, before the run."""
    record = run_record("paced" if endpoint.is_paced else "measured")
    return BenchConditions(
        **msgspec.structs.asdict(record),
        url=endpoint.url,
        model=endpoint.model,
        pace_dilation=endpoint.pace_dilation,
    )


def shown_settings(settings: BenchSettings) -> dict[str, object]:
    """All settings, with the key's value hidden."""
    shown: dict[str, object] = msgspec.to_builtins(settings, enc_hook=str)
    endpoint = shown["endpoint"]
    assert isinstance(endpoint, dict)
    if endpoint["api_key"] is not None:
        endpoint["api_key"] = _HIDDEN
    return shown


def detailed(records: Records) -> dict[str, list[object]]:
    """Times of each request as columns, milliseconds after the first arrival; None where it failed."""
    lines, ok = records.timelines, records.is_ok
    start_ns = lines.arrival_ns.min()

    def column(values: Sequence[float]) -> list[object]:
        return [value if good else None for value, good in zip(values, ok.tolist(), strict=True)]

    return {
        "arrival_ms": ((lines.arrival_ns - start_ns) / 1e6).tolist(),
        "late_ms": (records.late_ns / 1e6).tolist(),
        "end_ms": ((records.end_ns - start_ns) / 1e6).tolist(),
        "first_token_ms": column(((lines.first_token_ns - start_ns) / 1e6).tolist()),
        "last_token_ms": column(((lines.last_token_ns - start_ns) / 1e6).tolist()),
        "input_tokens": column(records.num_prompt_tokens.tolist()),
        "cached_tokens": column(records.num_cached_tokens.tolist()),
        "output_tokens": column(lines.num_tokens.tolist()),
    }


def write_json(path: Path, result: Result) -> None:
    """Write `result`, indented. Raises ConfigError if the directory does not exist."""
    text = msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error


def print_report(console: Console, report: Report) -> None:
    """Print the figures of one run."""
    console.print(_latencies(report))
    for name, text in _rows(report):
        console.print(f"{name:<14} {text}", markup=False, highlight=False, soft_wrap=True)
    if not report.is_valid:
        console.print(
            f"INVALID: the client was more than {MAX_LATE_MS:g} ms behind at its p99, so these figures measure it as"
            " much as the server. Lower the rate, or give the client a machine, or a core, of its own.",
            style="bold red",
            soft_wrap=True,
        )


def print_probe(console: Console, probe: Probe) -> None:
    """Print one line of a search."""
    report, goodput = probe.report, probe.report.goodput
    assert goodput is not None
    ttft = "-" if report.ttft_ms is None else f"{report.ttft_ms.p99:.0f}"
    tpot = "-" if report.tpot_ms is None else f"{report.tpot_ms.p99:.1f}"
    console.print(
        f"{probe.rate:9.3f} requests/s: {goodput.share:.3f} good, p99 TTFT {ttft} ms, p99 TPOT {tpot} ms,"
        f" {report.num_requests - report.num_ok} failed: {probe.verdict}",
        highlight=False,
        soft_wrap=True,
    )


def print_found(console: Console, found: Found) -> None:
    """Print the result of a search in a sentence."""
    share = f"at least {found.slo_share:g} of the requests meet the objectives"
    if found.rate is None:
        text = f"No tried rate was found at which {share}."
    elif found.above is None:
        text = f"{found.rate:.3f} requests/s: {share}; no higher rate was tried. Raise --max-probes or --request-rate."
    else:
        text = f"{found.rate:.3f} requests/s: {share}; at {found.above:.3f} they no longer do."
    if found.is_client_bound:
        text += " The client could not offer more: the server may hold more than this."
    console.print(text, style="bold", highlight=False, soft_wrap=True)


def _latencies(report: Report) -> Table:
    table = Table(title="Latency, ms", title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99"):
        table.add_column(name, justify="right")
    for name, spread in (
        ("TTFT", report.ttft_ms), ("TPOT", report.tpot_ms), ("ITL", report.itl_ms), ("E2E", report.e2e_ms)
    ):  # fmt: skip
        table.add_row(name, *_cells(spread))
    return table


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 5
    return [f"{value:.2f}" for value in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99)]


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.num_ok} answered of {report.num_requests} in {report.duration_s:.2f} s"
    yield (
        "throughput",
        (
            f"{report.requests_per_s:.2f} requests/s, {report.input_tokens_per_s:.1f} input and"
            f" {report.output_tokens_per_s:.1f} output tokens/s"
        ),
    )
    yield (
        "tokens",
        (
            f"{report.num_input_tokens:,} input ({report.cached_share:.3f} of them from the cache),"
            f" {report.num_output_tokens:,} output"
        ),
    )
    if report.goodput is not None:
        yield "goodput", _goodput(report.goodput)
    for word, failure in report.failures.items():
        yield "failed", f"{failure.count} {word}: {failure.example}"
    if report.num_wrong_length:
        yield "length", f"{report.num_wrong_length} answers lack the requested length: does the server ignore_eos?"
    late, stalls = report.send_lateness, report.client_stalls
    yield "client late", f"sending p50 {late.p50:.2f}, p99 {late.p99:.2f}, max {late.max:.2f} ms"
    yield "client stalls", f"p50 {stalls.p50:.2f}, p99 {stalls.p99:.2f}, max {stalls.max:.2f} ms"


def _goodput(goodput: Goodput) -> str:
    bounds = {"TTFT": goodput.ttft_ms, "TPOT": goodput.tpot_ms, "E2E": goodput.e2e_ms}
    slos = ", ".join(f"{name} {bound:g} ms" for name, bound in bounds.items() if bound is not None)
    return f"{goodput.requests_per_s:.2f} requests/s, {goodput.share:.3f} of all, within {slos}"


@dataclass(frozen=True, slots=True)
class BenchOutcome:
    """Result of a bench; `records` are those of its one run, or of a search's best rate."""

    result: Result
    slos: Slos | None
    records: Records | None


def bench(settings: BenchSettings, console: Console) -> BenchOutcome:
    """Measure, print to `console`, write --json.

    Raises:
        ConfigError: the settings cannot be honoured, or no server answers at the URL; the text says what to do.
        MoestroError: no request was answered; figures and the failures' causes are printed first.
    """
    slos = parse_slos(settings.goals.goodput)
    _raise_open_files()
    requested = make_rows(settings.requests, settings.arrivals.request_rate)
    endpoint = uvloop.run(_find(settings.endpoint))
    rows = fit(requested, endpoint.max_model_len, settings.requests.skip_too_long)
    measurement = _Measurement(settings, endpoint, Loads(settings, endpoint, rows), slos, console)
    conditions = make_conditions(endpoint)
    measurement.warm_up()
    report, found = measurement.search() if settings.goals.find_rate else (measurement.run(), None)
    records = measurement.best_records
    result = Result(
        conditions=conditions,
        settings=shown_settings(settings),
        num_skipped=len(requested) - len(rows),
        notes=tuple(requested.notes),
        is_generated=rows.is_generated,
        report=report,
        found=found,
        probes=tuple(measurement.probes),
        requests=detailed(records) if settings.results.save_detailed and records is not None else None,
    )
    _tell(console, settings, result)
    return BenchOutcome(result, slos, records)


class _Measurement:
    """The numbered runs of one bench, each with its own prompts.

    Attributes:
        probes: probes of a search, in order.
        best_records: records of the run, or of the highest rate that held.
    """

    def __init__(
        self, settings: BenchSettings, endpoint: Endpoint, loads: Loads, slos: Slos | None, console: Console
    ) -> None:
        self._settings, self._endpoint, self._loads = settings, endpoint, loads
        self._slos, self._console = slos, console
        self._num_runs = 0
        self._first_guess = 1.0  # requests a second, where the operator gives no rate
        self.probes: list[Probe] = []
        self.best_records: Records | None = None

    def warm_up(self) -> None:
        """Send the warm-up. Raises MoestroError if no request of it was answered."""
        if self._settings.arrivals.num_warmups:
            records = self._send("warm-up", self._loads.warm_up())
            if not records.is_ok.any():
                causes = "; ".join(f"{word}: {example}" for word, (_, example) in records.failures.items())
                raise MoestroError(f"no warm-up request was answered: {causes}")
            self._first_guess = make_report(records).requests_per_s

    def run(self) -> Report:
        """Run once at the settings' own rate."""
        self._num_runs += 1
        self.best_records = self._send("run", self._loads.run(self._num_runs))
        return make_report(self.best_records, self._slos)

    def search(self) -> tuple[Report | None, Found]:
        """Find the highest rate that meets the objectives, and its report."""
        goals = self._settings.goals
        start = self._settings.arrivals.request_rate or self._first_guess
        bracket = find_highest(self._probe, start, goals.rate_tolerance, goals.max_probes)
        best = [probe.report for probe in self.probes if probe.rate == bracket.holds and probe.verdict is Verdict.HOLDS]
        found = Found(
            rate=bracket.holds,
            above=bracket.above,
            is_client_bound=bracket.is_client_bound,
            slo_share=goals.slo_share,
        )
        return (best[0] if best else None), found

    def _probe(self, rate: float) -> Verdict:
        """Try a rate, and once more if the client was late: on a shared machine a neighbour may have caused that."""
        verdict = self._try(rate)
        return self._try(rate) if verdict is Verdict.INVALID else verdict

    def _try(self, rate: float) -> Verdict:
        self._num_runs += 1
        records = self._send(f"{rate:.3f} requests/s", self._loads.run(self._num_runs, rate))
        report = make_report(records, self._slos)
        verdict = self._verdict(report)
        if verdict is Verdict.HOLDS:
            self.best_records = records
        self.probes.append(Probe(rate=rate, verdict=verdict, report=report))
        print_probe(self._console, self.probes[-1])
        return verdict

    def _verdict(self, report: Report) -> Verdict:
        assert report.goodput is not None
        if not report.is_valid:
            return Verdict.INVALID
        return Verdict.HOLDS if report.goodput.share >= self._settings.goals.slo_share else Verdict.FAILS

    def _send(self, title: str, load: BenchLoad) -> Records:
        with progress(title, len(load.bodies)) as on_end:
            return run_load(self._settings.endpoint, self._endpoint, load, on_end)


async def _find(settings: EndpointSettings) -> Endpoint:
    async with BenchClient(settings) as client:
        return await client.find_endpoint()


def _tell(console: Console, settings: BenchSettings, result: Result) -> None:
    report, conditions = result.report, result.conditions
    console.print(f"{conditions.model} at {conditions.url}", markup=False, highlight=False, soft_wrap=True)
    if conditions.pace_dilation != 1:
        factor = f"{conditions.pace_dilation:g}"
        console.print(
            f"dilated        the server's times are {factor} times the modelled ones: divide durations by {factor}, and"
            f" multiply rates by {factor}",
            highlight=False,
        )
    if result.is_generated and settings.requests.dataset_name != "random":
        console.print("requests       generated, not recorded", highlight=False)
    for note in result.notes:
        console.print(f"trace          {note}", markup=False, highlight=False, soft_wrap=True)
    if result.num_skipped:
        console.print(f"skipped        {result.num_skipped} requests longer than the model's context", highlight=False)
    if report is not None:
        print_report(console, report)
    if result.found is not None:
        print_found(console, result.found)
    if settings.results.json is not None:
        write_json(settings.results.json, result)
    if report is not None and not report.num_ok:
        raise MoestroError("no request was answered")


def _raise_open_files() -> None:
    """Raise the limit of open files: each request in flight is a connection, and the usual 1,024 are too few."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
