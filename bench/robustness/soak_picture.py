"""The picture of a soak: memory and open files of each server over time, and the moments of the faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

_COLOURS = {"SIGKILL": "tab:red", "SIGSTOP": "tab:orange", "SIGTERM": "tab:purple"}


def draw_soak(samples: Sequence[dict], faults: Sequence[tuple[float, str]], path: Path) -> None:
    """Write a PNG.

    Args:
        samples: rows of {"s": seconds, server: [MB, files, threads]}.
        faults: (seconds, kind).
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    memory, files = figure.subplots(2, 1, sharex=True)
    for name in ("A", "B", "router"):
        rows = [row for row in samples if name in row]
        minutes = [row["s"] / 60 for row in rows]
        memory.plot(minutes, [row[name][0] for row in rows], label=name)
        files.plot(minutes, [row[name][1] for row in rows], label=name)
    for seconds, kind in faults:
        for axes in (memory, files):
            axes.axvline(seconds / 60, color=_COLOURS[kind.split()[0]], alpha=0.25, linewidth=1)
    memory.set_ylabel("resident memory, MB")
    memory.set_title("API servers A and B, and the router; SIGKILL red, SIGSTOP orange, SIGTERM purple")
    files.set(ylabel="open files", xlabel="minutes")
    memory.legend(loc="lower right")
    figure.savefig(path, dpi=110)
