"""Pictures of Gimbal's experiment: changes from vLLM by shape, and the waterfall of the whole stack."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moestro.repro.gimbal.experiment import GimbalExperiment
from moestro.repro.gimbal.loads import CELL_FIGURES, GimbalFindings
from moestro.repro.gimbal.systems import MOESTRO, STACK, TABLE, VLLM, VLLM_EPLB

_ENGINES = ("healthy", "slow", "scarce")
_LEVELS = {"moestro_route": "1 route", "moestro_order": "2 order", "moestro_place": "4 place"}
_SHOWN = ("TTFT", "TPOT", "throughput")
_BETTER, _WORSE, _WHOLE = "C2", "C3", "0.4"


def pictures(experiment: GimbalExperiment, findings: GimbalFindings) -> dict[str, Figure]:
    """One picture of the shapes for each engine that was run, and one of the stack."""
    del experiment
    found = {}
    for engine in _ENGINES:
        loads = [load for load in findings.loads if load.startswith(f"{engine}_")]
        if loads:
            found[engine] = _shapes(engine, loads, findings)
    if "stack" in findings.loads:
        found["stack"] = _stack(findings)
    return found


def _shapes(engine: str, loads: list[str], findings: GimbalFindings) -> Figure:
    """Bars: the change from vLLM of each system on each shape at the highest rate."""
    figure = Figure(figsize=(11.0, 3.2 * len(_SHOWN)), layout="constrained")
    panels = figure.subplots(len(_SHOWN), 1, squeeze=False).ravel()
    systems = [name for name in TABLE if name != VLLM]
    width = 0.8 / len(systems)
    for axes, name in zip(panels, _SHOWN, strict=True):
        for number, system in enumerate(systems):
            changes = []
            for load in loads:
                rate = findings.rates(load)[-1]
                change = findings.change(name, findings.of(load, rate, system), findings.of(load, rate, VLLM))
                changes.append(np.nan if change is None else 100 * change)
            axes.bar(np.arange(len(loads)) + number * width, changes, width, label=system)
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(np.arange(len(loads)) + 0.4 - width / 2, [load.split("_", 1)[1] for load in loads])
        axes.set_ylabel(f"{name}, change from vLLM, %")
        axes.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize="small", ncols=4)
    figure.suptitle(f"Gimbal's shapes at the highest rate, {engine} engine, simulated")
    return figure


def _stack(findings: GimbalFindings) -> Figure:
    """Waterfalls: from vLLM with EPLB, the change by each level alone, what they change together, and all levels."""
    figure = Figure(figsize=(12.0, 4.2), layout="constrained")
    panels = figure.subplots(1, len(_SHOWN))
    rate = findings.rates("stack")[-1]
    for axes, name in zip(panels, _SHOWN, strict=True):
        values = {
            system: float(np.mean([CELL_FIGURES[name](cell) for cell in findings.of("stack", rate, system)]))
            for system in STACK
        }
        _waterfall(axes, values, lower_is_better=name != "throughput")
        axes.set_title(f"{name}, {'ms' if name != 'throughput' else 'requests/s'}")
    figure.suptitle("The whole stack: drifting tenants on four A100 in two machines, simulated")
    return figure


def _waterfall(axes: Axes, values: dict[str, float], *, lower_is_better: bool) -> None:
    base, whole = values[VLLM_EPLB], values[MOESTRO]
    steps = [(label, values[system] - base) for system, label in _LEVELS.items()]
    steps.append(("together", whole - base - sum(change for _, change in steps)))
    labels = ["vLLM + EPLB", *(label for label, _ in steps), "Moestro"]
    axes.bar(0, base, color=_WHOLE)
    at = base
    for number, (_, change) in enumerate(steps, start=1):
        is_better = (change < 0) == lower_is_better
        axes.bar(number, abs(change), bottom=min(at, at + change), color=_BETTER if is_better else _WORSE)
        axes.annotate(f"{change / base:+.1%}", (number, max(at, at + change)), ha="center", va="bottom", fontsize=8)
        at += change
    axes.bar(len(steps) + 1, whole, color=_WHOLE)
    axes.annotate(f"{whole / base - 1:+.1%}", (len(steps) + 1, whole), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
