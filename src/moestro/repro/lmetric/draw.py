"""Pictures of LMetric's findings. The frame imports this file only to draw, because the extra `plots` is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from moestro.repro.experiment import Experiment
from moestro.repro.lmetric.findings import (
    BASELINE,
    FIGURES,
    HALF,
    HEAVY,
    KNEE,
    LIGHT,
    OUR_POLICY,
    PAPER_POLICY,
    PERCENTILES,
    Course,
    LmetricFindings,
)

_SIZE = (11.0, 7.0)
_COLOURS = {"better": "C2", "undecided": "0.6", "worse": "C3"}
_TICKS = (-100, -10, 0, 10, 100)  # %, of differences
_TUNED = {"bailian": "lambda (Fig. 11)", "dynamo": "weight of prompt tokens", "aibrix": "range (Fig. 12)"}
_LEAST_SHARE = 0.005  # in the logarithmic picture
_LATENCIES: dict[str, Callable[[Course], tuple[float, ...]]] = {
    "TTFT": lambda course: course.ttft_ms,
    "TPOT": lambda course: course.tpot_ms,
}
_SHOWN = ("round_robin", "vllm-0.26", "bailian", "dynamo", "llm-d", PAPER_POLICY, OUR_POLICY)


def pictures(experiment: Experiment[LmetricFindings], findings: LmetricFindings) -> dict[str, Figure]:
    """Pictures of everything that was run."""
    del experiment
    figures = {f"rates_{load}": _rates(findings, load) for load in findings.loads}
    figures |= {f"half_load_{load}": _bars(findings, load) for load in findings.loads}
    for load in dict.fromkeys(course.load for course in findings.courses):
        courses = {course.system: course for course in findings.courses if course.load == load}
        figures |= {f"latencies_{load}": _curves(courses, load), f"courses_{load}": _courses(courses, load)}
    if findings.sweeps:
        figures["tuning"] = _tuning(findings)
    if findings.errors:
        figures["prediction"] = _prediction(findings)
    if findings.classes:
        figures["classes"] = _classes(findings)
    if findings.pairs:
        figures["ours"] = _ours(findings)
    return figures


def _rates(findings: LmetricFindings, load: str) -> Figure:
    """Each figure over the rate, a line a policy."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    for axes, (name, of) in zip(figure.subplots(2, 2).flat, FIGURES.items(), strict=True):
        for policy in _SHOWN:
            runs = [findings.by_policy(load, share) for share in findings.shares(load)]
            cells = [by_policy[policy] for by_policy in runs if policy in by_policy]
            if cells:
                style = {"linewidth": 2.5} if policy == OUR_POLICY else {}
                axes.plot([c.rate for c in cells], [of(c.measured) for c in cells], "o-", label=policy, **style)
        axes.set(title=name, xlabel="requests/s", ylabel="ms", yscale="log")
    figure.axes[0].legend()
    figure.suptitle(f"{load}: {findings.num_engines} engines, simulated; less is better")
    return figure


def _bars(findings: LmetricFindings, load: str) -> Figure:
    """Every policy at half the load: TTFT against TPOT, and where prompts were found in the cache."""
    cells = sorted(findings.by_policy(load, HALF).values(), key=lambda cell: cell.measured.ttft_ms.mean)
    figure = Figure(figsize=_SIZE, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    names = [cell.system for cell in cells]
    colours = ["C3" if name == OUR_POLICY else "C1" if name == PAPER_POLICY else "C0" for name in names]
    for axes, (title, values) in zip(
        panels,
        (
            ("mean TTFT, ms", [cell.measured.ttft_ms.mean for cell in cells]),
            ("mean TPOT, ms", [cell.measured.tpot_ms.mean for cell in cells]),
            ("prompt tokens found in the cache", [cell.measured.hit_ratio for cell in cells]),
        ),
        strict=True,
    ):
        axes.barh(names, values, color=colours)
        axes.set(title=title)
        axes.invert_yaxis()
    figure.suptitle(f"{load} at half of the capacity, simulated")
    return figure


def _curves(courses: Mapping[str, Course], load: str) -> Figure:
    """Draw TTFT and TPOT as cumulative shares (Fig. 21 to 24)."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, of) in zip(panels, _LATENCIES.items(), strict=True):
        for policy in (name for name in _SHOWN if name in courses):
            axes.plot(of(courses[policy]), np.array(PERCENTILES) / 100, label=policy)
        axes.set(title=title, xlabel="ms", xscale="log")
    panels[0].set(ylabel="share of requests")
    panels[0].legend()
    figure.suptitle(f"{load} at half of the capacity, simulated")
    return figure


def _courses(courses: Mapping[str, Course], load: str) -> Figure:
    """Draw hit ratios over time (Fig. 8, 9, 26), and the prefill seconds of two engines (Fig. 10, 27)."""
    figure = Figure(figsize=(_SIZE[0], 1.4 * _SIZE[1]), layout="constrained")
    panels = figure.subplots(3, 2)
    weights = [f"bailian:hit_weight={weight:g}" for weight in (LIGHT, KNEE, HEAVY)]
    for axes, names in zip(panels[0], ((BASELINE, *weights), _SHOWN), strict=True):
        for name in (name for name in names if name in courses):
            axes.plot(_times(courses[name], courses[name].hit_ratio), courses[name].hit_ratio, label=name)
        axes.set(title="prompt tokens found in the cache", xlabel="s", ylim=(0, 1))
        axes.legend(ncols=2, fontsize=8, loc="upper right")
    for axes, name in zip(panels[1:].flat, (weights[1], weights[2], PAPER_POLICY, "llm-d"), strict=True):
        if name in courses:
            for series in courses[name].prefill_s:
                axes.plot(_times(courses[name], series), series)
        axes.set(title=f"{name}, the two unsteadiest engines", xlabel="s", ylabel="prefill, s in 10 s")
    figure.suptitle(f"{load} at half of the capacity, simulated")
    return figure


def _times(course: Course, series: Sequence[float]) -> NDArray[np.float64]:
    """The begin of each window of a series, seconds after the first."""
    times: NDArray[np.float64] = course.window_s * np.arange(len(series), dtype=np.float64)
    return times


def _tuning(findings: LmetricFindings) -> Figure:
    """Draw what needs tuning: the weights of the sums and the range of the filter. The product needs nothing."""
    figure = Figure(figsize=(_SIZE[0], 1.2 * _SIZE[1]), layout="constrained")
    grid = figure.subplots(2, len(_TUNED))
    for row, name in zip(grid, ("TTFT mean", "TPOT mean"), strict=True):
        for axes, (policy, title) in zip(row, _TUNED.items(), strict=True):
            for load, by_policy in findings.sweeps.items():  # every load has the same values
                values = np.array([FIGURES[name](each) for _, each in by_policy[policy].values])
                axes.plot([value for value, _ in by_policy[policy].values], values / values.min(), "o-", label=load)
            axes.set(title=title, xlabel=policy, ylabel=f"{name} over the best of the sweep")
            if policy == "bailian":
                axes.set_yscale("log")
            else:
                tried = [value for value, _ in by_policy[policy].values]
                axes.set(xscale="log", xticks=tried, xticklabels=[f"{value:g}" for value in tried])
                axes.minorticks_off()
    grid[0][0].legend()
    return figure


def _classes(findings: LmetricFindings) -> Figure:
    """Draw a point for each request: the heat of its class against the number of engines that hold it (Fig. 20)."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    loads = list(findings.classes)
    panels = figure.subplots(2, -(-len(loads) // 2), squeeze=False, sharex=True, sharey=True)
    for axes, load in zip(panels.flat, loads, strict=False):
        classes = findings.classes[load]
        hot, held = np.asarray(classes.class_share), np.asarray(classes.holder_share)
        axes.scatter(np.maximum(held, _LEAST_SHARE), np.maximum(hot, _LEAST_SHARE), s=6, alpha=0.4)
        axes.plot([_LEAST_SHARE, 1], [_LEAST_SHARE, 1], color="C3", linestyle="--")
        axes.set(title=load, xscale="log", yscale="log", xlabel="share of engines that hold it")
        axes.set(ylabel="share of requests in the class")
    for axes in panels.flat[len(loads) :]:
        axes.remove()
    figure.suptitle("Below the line no class can overload the engines that hold its prefix; simulated")
    return figure


def _ours(findings: LmetricFindings) -> Figure:
    """Draw `moestro` against the best rival of each cell, with 95 % intervals."""
    figure = Figure(figsize=(11.0, 1.5 + 0.28 * len(findings.pairs) / len(FIGURES)), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(FIGURES), sharey=True), FIGURES, strict=True):
        pairs = [pair for pair in findings.pairs if pair.figure == name]
        at = np.arange(len(pairs))
        for row, pair in enumerate(pairs):
            found = pair.difference
            axes.plot([100 * found.low, 100 * found.high], [row, row], color=_COLOURS[found.verdict], linewidth=2)
        axes.plot([100 * pair.difference.mean for pair in pairs], at, "k.")
        axes.axvline(0, color="0.5", linewidth=0.8)
        axes.set(title=name, xlabel="%", yticks=at)
        axes.set_xscale("symlog", linthresh=10)  # some intervals are ten times as long as others
        axes.set(xlim=(-500, 500), xticks=_TICKS, xticklabels=[f"{tick:+d}" if tick else "0" for tick in _TICKS])
        axes.minorticks_off()
        axes.set_yticklabels([f"{pair.load} at {pair.share:.0%}" for pair in pairs], fontsize=7)
    figure.axes[0].invert_yaxis()
    figure.suptitle(
        f"{OUR_POLICY} against the best rival of each cell: left of 0 is better (simulated)\n"
        "95 % intervals: green all better, red all worse, grey undecided; logarithmic beyond 10 %"
    )
    return figure


def _prediction(findings: LmetricFindings) -> Figure:
    """Relative errors of predicted TTFT, as cumulative shares (Fig. 16)."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    for errors in findings.errors:
        name = f"{errors.load}, " + ("tuned: the network served" if errors.is_tuned else "mistuned: another network")
        axes.plot(errors.curve, np.arange(101) / 100, label=name)
    axes.axvline(0.2, color="C3", linestyle="--")
    axes.set(xlabel="|predicted / actual - 1| of TTFT", ylabel="share of requests", xlim=(0, 2))
    axes.legend()
    return figure
