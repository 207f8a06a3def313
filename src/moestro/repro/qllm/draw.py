"""QLLM's findings as pictures. Needs the extra `plots`; nothing else imports it."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moestro.repro.qllm.claims import Figure as Value
from moestro.repro.qllm.claims import be_turnaround, ls_ttft, ls_turnaround, throughput
from moestro.repro.qllm.engines import (
    EXPERT,
    EXPERT_AGED,
    EXPERT_MIXED,
    FCFS,
    FCFS_64,
    ITERATION,
    ITERATION_AGED,
    ITERATION_MIXED,
    RUN_TO_COMPLETION,
    SLO_S,
)
from moestro.repro.qllm.experiment import Findings

_SIZE = (12.0, 8.5)
# What people call them, and how they are drawn; the same engine with ageing has the same colour, dashed,
# as is the like of another without preemption, or with more places.
_LINES = {
    RUN_TO_COMPLETION: ("run to completion (the paper's baseline)", "C7", "-"),
    FCFS: ("continuous batching, first come first served", "C0", "-"),
    FCFS_64: ("... with 64 places, as all below", "C0", "--"),
    ITERATION: ("priority between iterations (Algorithm 1)", "C1", "-"),
    ITERATION_AGED: ("... with ageing", "C1", "--"),
    EXPERT: ("QLLM: preemption at every expert call", "C3", "-"),
    EXPERT_AGED: ("... with ageing", "C3", "--"),
    ITERATION_MIXED: ("LS first between iterations, mixed batches", "C2", "--"),
    EXPERT_MIXED: ("preemption at every expert call, mixed batches (ours)", "C2", "-"),
}


def save_pictures(findings: Findings, directory: Path) -> list[Path]:
    """One PNG a load: the paper's figures 2, 3 and 4; returns their paths."""
    paths = []
    for load in findings.loads:
        paths.append(directory / f"qllm_{load}.png")
        _picture(findings, load).savefig(paths[-1], dpi=120)
    return paths


def _picture(findings: Findings, load: str) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    _panel(first, findings, load, ("time to first token, latency-sensitive, s", ls_ttft, 1e3))
    first.axhline(SLO_S, color="C2", linestyle=":", label=f"objective, {SLO_S:g} s")
    _panel(second, findings, load, ("turnaround, latency-sensitive, s", ls_turnaround, 1e3))
    _panel(third, findings, load, ("turnaround, best effort, s", be_turnaround, 1e3))
    _panel(fourth, findings, load, ("requests answered a second", throughput, 1.0))
    for axes in (first, second, third):
        axes.set(yscale="log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(FuncFormatter(lambda value, _: f"{value:g}"))
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(
        f"QLLM's cost (Mixtral 8x7B, 4 bits, A100), simulated; {load.replace('_', ' ')}; bars: spread of seeds"
    )
    return figure


def _panel(axes: Axes, findings: Findings, load: str, what: tuple[str, Value, float]) -> None:
    title, of, unit = what
    for engine, (label, colour, style) in _LINES.items():
        rates = [rate for rate in findings.rates(load) if len(findings.values(load, rate, engine, of))]
        values = [findings.values(load, rate, engine, of) / unit for rate in rates]
        means = [each.mean() for each in values]
        spread = [[m - v.min() for m, v in zip(means, values, strict=True)],
                  [v.max() - m for m, v in zip(means, values, strict=True)]]  # fmt: skip
        if rates:
            axes.errorbar(rates, means, spread, label=label, color=colour, linestyle=style, marker="o", capsize=2)
    axes.set(title=title, xlabel="requests a second", xscale="log" if min(findings.rates(load)) < 1 else "linear")
    axes.grid(alpha=0.3)
