"""`moestro bench` from start to end: finds the model, makes the load, warms up, runs or searches, reports."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

import uvloop
from rich.console import Console

from moestro.errors import MoestroError
from moestro.loadgen.client import BenchClient, Endpoint
from moestro.loadgen.dataset import Loads, fit, make_rows
from moestro.loadgen.load import BenchLoad, run_load
from moestro.loadgen.result import (
    Found,
    Probe,
    Result,
    detailed,
    make_conditions,
    shown_settings,
    write_json,
)
from moestro.loadgen.settings import BenchSettings, EndpointSettings
from moestro.loadgen.show import print_found, print_probe, print_report
from moestro.workload.progress import progress
from moestro.workload.runs.records import Records
from moestro.workload.runs.report import Report, Slos, make_report, parse_slos
from moestro.workload.runs.search import Verdict, find_highest


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
