"""The picture of a plan. The extra `plots` is needed; the verb imports this module only to draw."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from moestro.planner.plan import DeploymentPlan
from moestro.planner.question import PlanQuestion

_SIZE = (9.0, 6.0)
_MOST_CURVES = 6


def save_curves(path: Path, plan: DeploymentPlan, question: PlanQuestion) -> None:
    """Draw throughput against mean ITL of the best deployments, with the objective, into a PNG file."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    shown = [each for each in plan.deployments if each.points][:_MOST_CURVES]
    for number, each in enumerate(shown):
        axes.plot(
            [point.tokens_per_s for point in each.points],
            [point.itl_ms for point in each.points],
            "o-", ms=4, color=f"C{number}", label=each.title,
        )  # fmt: skip
        if each.tokens_per_s is not None and each.itl_ms is not None:
            axes.plot([each.tokens_per_s], [each.itl_ms], "*", ms=14, color=f"C{number}")
    axes.axhline(question.settings.objectives.max_itl, color="0.5", linestyle=":", label="objective of ITL")
    if question.tokens_per_s_needed is not None:
        axes.axvline(question.tokens_per_s_needed, color="0.5", linestyle="--", label="--request-rate")
    axes.set(
        xlabel="output tokens a second (star: the most within the objectives)", ylabel="mean ITL, ms", xlim=(0, None)
    )
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    hardware = question.settings.hardware
    figure.suptitle(f"{question.network.name} on {hardware.num_gpus} {question.gpu.name}, simulated")
    figure.savefig(path, dpi=120)
