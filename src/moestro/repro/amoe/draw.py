"""Pictures of AMoE's findings: throughput against ITL with the bounds, and requests that end over time."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moestro.repro.amoe.experiment import AmoeExperiment
from moestro.repro.amoe.loads import AmoeFindings
from moestro.repro.amoe.paper import Part

_SIZE = (10.0, 6.0)


def pictures(experiment: AmoeExperiment, findings: AmoeFindings) -> dict[str, Figure]:
    """One picture for each part that was run."""
    return {load: _picture(experiment.parts[load], findings) for load in findings.loads}


def _picture(part: Part, findings: AmoeFindings) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    if part.is_cold:
        _draw_ends(axes, part, findings)
    else:
        _draw_curves(axes, part, findings)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the points
    axes.grid(alpha=0.3)
    bed = part.bed
    figure.suptitle(
        f"figure {part.figure}: {part.lengths} lengths, {bed.network} on {bed.num_gpus} {bed.gpu},\n"
        f"experts {bed.popularity}, prices of the {bed.prices}, simulated"
    )
    return figure


def _draw_curves(axes: Axes, part: Part, findings: AmoeFindings) -> None:
    """Runs at rates as points, runs with constant numbers of requests as lines, bounds as vertical lines."""
    for number, system in enumerate(part.systems):
        colour = f"C{number % 10}"
        closed = sorted(
            (run for run in findings.closed if (run.load, run.system) == (part.name, system)),
            key=lambda run: run.num_requests,
        )
        axes.plot([run.tokens_per_s for run in closed], [run.itl_ms for run in closed], "-", color=colour, lw=0.8)
        cells = [cell for cell in findings.cells if (cell.load, cell.system) == (part.name, system)]
        tokens, itl_ms = [cell.tokens_per_s for cell in cells], [cell.itl_ms for cell in cells]
        axes.plot(tokens, itl_ms, "o", color=colour, label=f"{system}\n(bound dashed)")
        for bound in {cell.bound for cell in cells}:
            axes.axvline(bound, color=colour, linestyle="--", lw=0.8)
    axes.set(xlabel="output tokens a second", ylabel="mean ITL, ms", yscale="log", xlim=(0, None))


def _draw_ends(axes: Axes, part: Part, findings: AmoeFindings) -> None:
    for cell in findings.cells:
        if cell.load == part.name:
            axes.plot(range(len(cell.ended_per_s)), cell.ended_per_s, label=f"{cell.system} at {cell.rate:.0f}/s")
    for rate in findings.rates(part.name):
        axes.axhline(rate, color="0.5", linestyle=":")
    axes.set(xlabel="seconds since the start, system empty", ylabel="requests that end a second; input dotted")
