"""The picture of `failures.py`: throughput over time with the kills, and throughput around a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

COLOURS = {"SIGKILL": "tab:red", "SIGSTOP": "tab:orange"}
SHOWN_S = 60.0
TITLES = {
    "expert_worker": "expert worker of 2+2",
    "expert_worker_two_copies": "expert worker of 2+2, two copies of each expert",
    "expert_worker_two_phase": "expert worker of 2+2, all tensors in two phases",
    "home": "attention worker of 2+2",
    "ep": "rank of ep, 2 engines",
}


def draw_failures(ways: dict[str, Any], path: Path) -> None:
    """Write the picture, a row for each way: the first minute with kills, and the medians over all kills around one.

    Args:
        ways: figures of each way, as `failures_report.report` returns them.
        path: the picture's file.
    """
    figure = Figure(figsize=(11, 2.4 * len(ways) + 0.6), layout="constrained")
    rows = figure.subplots(len(ways), 2, squeeze=False, width_ratios=(3, 2), sharey="row")
    for (name, figures), (over_time, around_kill) in zip(ways.items(), rows, strict=True):
        _draw_time(over_time, figures)
        over_time.set(title=f"killed: {TITLES[name]}", ylabel="tokens/s")
        _draw_around(around_kill, figures)
        around_kill.set(title=f"around {len(figures['kills'])} kills: median, and 10 to 90 %")
    rows[-1, 0].set(xlabel="seconds")
    rows[-1, 1].set(xlabel="seconds from the signal")
    rows[0, 1].legend(loc="lower right", fontsize="small")
    figure.suptitle("Throughput while workers are killed (SIGKILL) and stopped (SIGSTOP)")
    figure.savefig(path, dpi=110)


def _draw_time(axes: Any, figures: dict[str, Any]) -> None:
    series, kills = figures["series"], figures["kills"]
    begin = max(0.0, kills[0]["s"] - 5.0) if kills else 0.0
    seconds = series["bin_s"] * (0.5 + np.arange(len(series["tokens_per_s"]))) - begin
    axes.plot(seconds, series["tokens_per_s"], color="tab:blue", linewidth=1)
    for kill in kills:
        axes.axvline(kill["s"] - begin, color=COLOURS[kill["signal"]], linewidth=1)
    axes.set_xlim(0, min(SHOWN_S, seconds[-1]))
    axes.set_ylim(bottom=0)


def _draw_around(axes: Any, figures: dict[str, Any]) -> None:
    around = figures["around"]
    axes.axhline(figures["tokens_per_s"]["calm"], color="grey", linewidth=1, linestyle="--", label="without kills")
    for name, rates in sorted(around["signals"].items()):
        seconds = around["from_s"] + around["bin_s"] * (0.5 + np.arange(len(rates["median"])))
        axes.plot(seconds, rates["median"], color=COLOURS[name], linewidth=1.2, label=name)
        axes.fill_between(seconds, rates["p10"], rates["p90"], color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.axvline(0, color="black", linewidth=1)
