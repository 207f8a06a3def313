"""Terminal output: a progress bar on standard error, the table on standard output."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from moestro.loadgen.result import Found, Probe
from moestro.workload.runs.report import MAX_LATE_MS, Goodput, Report, Spread


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
