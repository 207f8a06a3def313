"""Pictures of a bench: latencies of a run, and shares and latencies by rate of a search.

This file loads matplotlib, so the verb imports it only for --plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from moestro.errors import ConfigError
from moestro.loadgen.runner import BenchOutcome
from moestro.workload.run_records import NS_PER_MS, Records, Report, Slos

_SIZE = (10.0, 6.0)


def run_figure(records: Records, report: Report, slos: Slos | None) -> Figure:
    """Draw the four latencies as cumulative shares, with p50, p90 and p99 marked and objectives as dashed lines."""
    figure, answered = Figure(figsize=_SIZE, layout="constrained"), records.answered
    bounds = slos or Slos()
    for axes, (name, values_ns, bound_ms) in zip(
        figure.subplots(2, 2).flat,
        (
            ("TTFT", answered.ttft_ns, bounds.ttft_ms),
            ("TPOT", answered.tpot_ns, bounds.tpot_ms),
            ("ITL", records.itl_ns, None),
            ("E2E", answered.e2e_ns, bounds.e2e_ms),
        ),
        strict=True,
    ):
        _cumulative(axes, values_ns[~np.isnan(values_ns)] / NS_PER_MS)
        axes.set(title=name, xlabel="ms", ylabel="share", ylim=(0, 1.02))
        if bound_ms is not None:
            axes.axvline(bound_ms, color="C3", linestyle="--", label="objective")
            axes.legend(loc="lower right")
    figure.suptitle(_title(report))
    return figure


def search_figure(rates: Sequence[float], reports: Sequence[Report], slo_share: float) -> Figure:
    """Draw the share of good requests, and p50 and p99 of TTFT and TPOT, over the rates of a search."""
    order = np.argsort(rates)
    x = np.asarray(rates, np.float64)[order]
    ranked = [reports[i] for i in order]
    figure = Figure(figsize=_SIZE, layout="constrained")
    top, ttft, tpot = figure.subplots(3, 1, sharex=True)
    top.plot(x, [0.0 if each.goodput is None else each.goodput.share for each in ranked], "o-")
    top.axhline(slo_share, color="C3", linestyle="--")
    top.set(ylabel="good share", ylim=(-0.02, 1.02))
    for axes, name in ((ttft, "ttft_ms"), (tpot, "tpot_ms")):
        for percentile in ("p50", "p99"):
            spreads = [getattr(each, name) for each in ranked]
            values = [np.nan if spread is None else getattr(spread, percentile) for spread in spreads]
            axes.plot(x, values, "o-", label=percentile)
        axes.set(ylabel=f"{name[:4].upper()}, ms", yscale="log")
        axes.legend(loc="upper left")
    tpot.set(xlabel="requests/s")
    return figure


def _cumulative(axes: Axes, values_ms: NDArray[np.float64]) -> None:
    if not len(values_ms):
        axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes)
        return
    ranked = np.sort(values_ms)
    axes.step(ranked, np.arange(1, len(ranked) + 1) / len(ranked), where="post")
    shares = np.array([0.5, 0.9, 0.99])
    axes.plot(np.quantile(ranked, shares), shares, "o", markersize=4)


def _title(report: Report) -> str:
    words = [f"{report.num_ok} of {report.num_requests} answered", f"{report.output_tokens_per_s:.1f} output tokens/s"]
    if report.goodput is not None:
        words.append(f"goodput {report.goodput.requests_per_s:.2f} requests/s ({report.goodput.share:.3f})")
    return ", ".join(words if report.is_valid else [*words, "INVALID: the client was late"])


def save_plot(path: Path, measured: BenchOutcome) -> None:
    """Draw a run's latencies, or a search's shares and latencies by rate.

    Raises:
        ConfigError: the file cannot be written, or its suffix is no picture format.
    """
    result = measured.result
    if result.found is not None:
        rates, reports = [probe.rate for probe in result.probes], [probe.report for probe in result.probes]
        figure = search_figure(rates, reports, result.found.slo_share)
    else:
        assert measured.records is not None
        assert result.report is not None
        figure = run_figure(measured.records, result.report, measured.slos)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
