"""A grid's figures over the rate as pictures. The extra `plots` is needed; the frame imports this file only to draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moestro.repro.experiment import GridExperiment, Line, Panel
from moestro.repro.results import Findings

_WIDTH, _PANEL_HEIGHT = 12.0, 4.25  # inches


def pictures(experiment: GridExperiment[Any], findings: Findings[Any]) -> dict[str, Figure]:
    """One picture for each load, a panel for each figure."""
    return {load: _picture(experiment, findings, load) for load in findings.loads}


def _picture(experiment: GridExperiment[Any], findings: Findings[Any], load: str) -> Figure:
    panels = experiment.panels or [Panel(each.title, each.of, each.unit) for each in experiment.columns]
    lines = experiment.lines or {system: Line(system) for system in experiment.plan.systems}
    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(_WIDTH, _PANEL_HEIGHT * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, 2, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, findings, load, panel, lines)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(f"{experiment.caption}; {load.replace('_', ' ')}; bars: spread of seeds")
    return figure


def _draw(axes: Axes, findings: Findings[Any], load: str, panel: Panel[Any], lines: Mapping[str, Line]) -> None:
    for system, line in lines.items():
        rates = [rate for rate in findings.rates(load) if len(findings.values(load, rate, system, panel.of))]
        values = [findings.values(load, rate, system, panel.of) / panel.unit for rate in rates]
        means = [each.mean() for each in values]
        spread = [[m - v.min() for m, v in zip(means, values, strict=True)],
                  [v.max() - m for m, v in zip(means, values, strict=True)]]  # fmt: skip
        if rates:
            style = f"o{line.style}"
            axes.errorbar(rates, means, spread, fmt=style, label=line.label, color=line.colour, capsize=2)
    if panel.objective is not None:
        axes.axhline(panel.objective, color="C2", linestyle=":", label=f"objective, {panel.objective:g} s")
    axes.set(title=panel.title, xlabel="requests a second", xscale="log" if min(findings.rates(load)) < 1 else "linear")
    axes.grid(alpha=0.3)
    if panel.is_log:
        axes.set(yscale="log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(FuncFormatter(lambda value, _: f"{value:g}"))
