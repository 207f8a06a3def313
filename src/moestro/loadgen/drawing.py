"""Writes a bench's plot to a file. This module loads matplotlib, so the verb imports it only for --plot."""

from __future__ import annotations

from pathlib import Path

from moestro.errors import ConfigError
from moestro.loadgen.runner import BenchOutcome
from moestro.workload.run_plots import run_figure, search_figure


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
