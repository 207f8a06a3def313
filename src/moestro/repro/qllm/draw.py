"""Pictures of QLLM's experiment: figures over the rate for each load, and the paper's over the length of answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moestro.repro import curves
from moestro.repro.experiment import GridExperiment
from moestro.repro.qllm.loads import EXPERT, RUN_TO_COMPLETION, SLO_S
from moestro.repro.qllm.paper import (
    MEAN_FACTOR,
    TURNAROUND_FACTOR,
    QllmFindings,
    SweepPoint,
    ls_ttft,
    paper_rates,
    sweep_point,
)


def pictures(experiment: GridExperiment[QllmFindings], findings: QllmFindings) -> dict[str, Figure]:
    """A picture of each load, and with several loads one over the length of answers."""
    drawn = curves.pictures(experiment, findings)
    points = [sweep_point(findings, load) for load in findings.loads]
    if len(points) > 1:
        drawn["lengths"] = _lengths(findings, points)
    return drawn


def _lengths(findings: QllmFindings, points: list[SweepPoint]) -> Figure:
    figure = Figure(figsize=(12.0, 8.5), layout="constrained")
    factors, objective, throughputs, turnarounds = figure.subplots(2, 2).ravel()
    _by_rate(factors, points, lambda point: point.ttft)
    lengths = [point.num_answer_tokens for point in points]
    factors.plot(lengths, [point.mean_factor for point in points], "k-", lw=2.5, label="mean of the rates")
    mean, most = MEAN_FACTOR.value, TURNAROUND_FACTOR.value
    factors.axhline(mean, color="k", linestyle=":", label=f"the paper's mean, {mean:g}")
    factors.set(title="TTFT of LS, baseline over QLLM", yscale="log")
    for engine, label, colour, at in (
        (EXPERT, "QLLM at the highest rate", "C3", -1),
        (RUN_TO_COMPLETION, "the baseline at the lowest rate", "C7", 0),
    ):
        ttft_s = [
            findings.values(point.load, paper_rates(findings, point.load)[at], engine, ls_ttft) / 1e3
            for point in points
        ]
        means = np.array([each.mean() for each in ttft_s])
        spread = [means - [each.min() for each in ttft_s], [each.max() for each in ttft_s] - means]
        objective.errorbar(lengths, means, spread, fmt="o-", label=label, color=colour, capsize=2)
    objective.axhline(SLO_S, color="C2", linestyle=":", label=f"objective, {SLO_S:g} s")
    objective.set(title="mean TTFT of LS, s", yscale="log")
    _by_rate(throughputs, points, lambda point: point.throughput)
    throughputs.axhline(1, color="k", linestyle=":", label="equal")
    throughputs.set(title="throughput, QLLM over baseline")
    _by_rate(turnarounds, points, lambda point: point.turnaround)
    turnarounds.axhline(most, color="k", linestyle=":", label=f"the paper's most, {most:g}")
    turnarounds.set(title="turnaround of LS, baseline over QLLM", yscale="log")
    for axes in (factors, objective, throughputs, turnarounds):
        axes.set(xscale="log", xlabel="tokens an answer, mean")
        axes.set_xticks(lengths, [f"{length:.0f}" for length in lengths], minor=False)
        axes.minorticks_off()
        if axes.get_yscale() == "log":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle("QLLM's figures over the length of answers, simulated; bars: spread of seeds")
    return figure


def _by_rate(axes: Axes, points: list[SweepPoint], of: Callable[[SweepPoint], dict[float, float]]) -> None:
    """Draw a line for each rate."""
    for rate in sorted({rate for point in points for rate in of(point)}):
        drawn = [(point.num_answer_tokens, of(point)[rate]) for point in points if rate in of(point)]
        axes.plot(*zip(*drawn, strict=True), "o-", ms=4, label=f"{rate:g} requests/s")
