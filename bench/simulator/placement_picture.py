"""Draws balance after a drift against the share of slots that moved, for every policy of `placement.py`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


def draw(path: Path, rows: list[dict]) -> None:
    """Draw a panel for each case and drift. Plans of one policy under growing budgets are joined by a line."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    drifts = list(dict.fromkeys(row["load"] for row in rows))
    if not rows:
        return
    figure = Figure(figsize=(4.2 * len(cases), 3.8 * len(drifts)), layout="constrained")
    grid = figure.subplots(len(drifts), len(cases), squeeze=False)
    names = list(dict.fromkeys(_name(row) for row in rows if "moved" in row))
    colour_of = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for i, drift in enumerate(drifts):
        for j, case in enumerate(cases):
            axes = grid[i, j]
            for name in names:
                points = [row for row in rows if (row["case"], row["load"], _name(row)) == (case, drift, name)]
                _draw_policy(axes, points, name, colour_of[name])
            axes.set_title(f"{case}\n{drift}", fontsize=9)
            axes.set_xlabel("slots that moved, %")
            axes.set_ylabel("mean load / largest load, mean of layers")
            axes.grid(alpha=0.3)
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(6, len(handles)))
    figure.suptitle("Balance after a drift against what had to move (bars: least and most of the seeds)")
    figure.savefig(path, dpi=110)


def _name(row: dict) -> str:
    return row["policy"].partition(", ")[0] if row["policy"].endswith("may move") else row["policy"]


def _draw_policy(axes: object, points: list[dict], name: str, colour: str) -> None:
    points = sorted((row for row in points if "moved" in row), key=lambda row: row["moved"][0])
    if not points:
        return
    moved, balance = ([row[what] for row in points] for what in ("moved", "balance_sglang"))
    axes.errorbar(
        [100 * each[0] for each in moved],
        [each[0] for each in balance],
        xerr=_bars(moved, 100),
        yerr=_bars(balance, 1),
        marker="o",
        markersize=4,
        capsize=2,
        linewidth=1.2 if len(points) > 1 else 0,
        elinewidth=0.8,
        color=colour,
        label=name,
    )


def _bars(spreads: list[list[float]], scale: float) -> list[list[float]]:
    """Distances from the mean down to the least and up to the most."""
    return [
        [scale * (mean - least) for mean, least, _ in spreads],
        [scale * (most - mean) for mean, _, most in spreads],
    ]
