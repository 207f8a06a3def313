"""Draws the queues of `async_ep.py`: tokens before each layer over time, paced above and simulated below."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

_KINDS = {"attention": "attention workers, tokens", "experts": "expert workers, (token, expert) pairs"}


def draw(path: Path, paced: list[dict], simulated: list[dict], dilation: float) -> None:
    """Draw the `async` runs of one dilation; the time is modelled, and colours of a column are comparable."""
    pairs = [
        (own, other)
        for own, other in zip(paced, simulated, strict=True)
        if own["mode"] == "async" and own["dilation"] == dilation
    ]
    if not pairs:
        return
    columns = [(own, other, kind) for own, other in pairs for kind in _KINDS]
    figure = Figure(figsize=(4 * len(columns), 6.5), layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=False, sharey=True, squeeze=False)
    for column, (own, other, kind) in enumerate(columns):
        most = max(np.max(own["queues"][kind]), np.max(other["queues"][kind]), 1)
        for row, (what, run, scale) in enumerate((("paced", own, dilation), ("simulated", other, 1.0))):
            axes = grid[row, column]
            # Waves of prompts are a hundred times as deep as those of decodes.
            norm = SymLogNorm(linthresh=1, vmin=0, vmax=most)
            mesh = axes.pcolormesh(*_cells(run["queues"], kind, scale), cmap="viridis", norm=norm)
            axes.set_title(f"{what}, {own['gate']} gate\n{_KINDS[kind]}", fontsize=9)
            axes.set_xlabel("modelled time, ms")
        figure.colorbar(mesh, ax=grid[:, column], location="bottom", shrink=0.8, label="mean of the workers")
    for row in range(2):
        grid[row, 0].set_ylabel("layer")
    figure.suptitle(f"Depth of the queues by layer, async 4+4, dilation {dilation:g}")
    figure.savefig(path, dpi=110)


def _cells(queues: dict[str, list], kind: str, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return edges of times and layers, and float[layers, times]; the last layer is the sampler."""
    at_ms = np.array(queues["at_s"]) * 1e3 / scale
    depths = np.array(queues[kind]).T
    step = np.median(np.diff(at_ms)) if len(at_ms) > 1 else 1.0
    return np.append(at_ms, at_ms[-1] + step), np.arange(len(depths) + 1), depths
