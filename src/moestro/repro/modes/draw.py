"""Pictures of the map: what `async` gains in every case, and throughput against ITL where it matters."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from moestro.repro.modes.experiment import GOAL, ITL_BOUNDS_MS, SYSTEMS, MapCase, ModesExperiment, ModesFindings

_COLUMNS = 4


def pictures(experiment: ModesExperiment, findings: ModesFindings) -> dict[str, Figure]:
    """The gains of all cases, and the curves of each."""
    names = findings.cases
    return {"map": _map(findings, names), "curves": _curves([experiment.parts[name] for name in names], findings)}


def _map(findings: ModesFindings, names: list[str]) -> Figure:
    """Bars: gain over the best of the others, by bound on ITL; the winner is written beside."""
    figure = Figure(figsize=(10.0, 1.5 + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(ITL_BOUNDS_MS)
    for number, itl_ms in enumerate(ITL_BOUNDS_MS):
        gains = [findings.gain(name, itl_ms) for name in names]
        at = np.arange(len(names)) + number * height
        means = np.array([np.nan_to_num(gain, posinf=np.nan).mean() for gain in gains])
        spread = [[np.nan_to_num(m - g.min()), np.nan_to_num(g.max() - m)] for m, g in zip(means, gains, strict=True)]
        axes.barh(at, means, height, xerr=np.array(spread).T.clip(0), label=f"mean ITL of at most {itl_ms:g} ms")
        for y, name in zip(at, names, strict=True):
            axes.text(0.02, y, findings.best(name, itl_ms), fontsize=6, va="center", color="white")
    axes.axvline(1.0, color="black", lw=0.8)
    axes.axvline(GOAL, color="black", lw=0.8, linestyle=":")
    axes.set_yticks(np.arange(len(names)) + height, names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("throughput of async as a multiple of the best other mode (simulated); in each bar the winner")
    axes.legend(fontsize="small", loc="lower right")
    return figure


def _curves(cases: list[MapCase], findings: ModesFindings) -> Figure:
    """Throughput against ITL of every system, a panel for each case, first seed."""
    num_rows = -(-len(cases) // _COLUMNS)
    figure = Figure(figsize=(4.0 * _COLUMNS, 3.0 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    for axes, case in zip(panels, cases, strict=False):
        for system in SYSTEMS:
            runs = [
                run for run in findings.closed if (run.load, run.system, run.seed) == (case.name, system, case.seeds[0])
            ]
            axes.plot([run.tokens_per_s for run in runs], [run.itl_ms for run in runs], "o-", ms=3, label=system)
        axes.set(title=f"{case.axis}: {case.about}", yscale="log", xlim=(0, None))
        axes.title.set_fontsize("small")
        axes.grid(alpha=0.3)
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    panels[0].legend(fontsize="x-small")
    figure.supxlabel("output tokens a second, simulated")
    figure.supylabel("mean ITL, ms")
    return figure
