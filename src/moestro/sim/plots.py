"""Figures of simulations. The extra `plots` is needed, so the verb imports this module only to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moestro.errors import ConfigError
from moestro.sim.figures import looks
from moestro.sim.results import WINDOW_NS, Results

_NS_PER_MS, _NS_PER_S = 1e6, 1e9
_WIDTH, _ROW = 10.0, 3.0
_MOST_LINES = 16  # engines drawn one by one; of more engines, only the spread is drawn

Runs = Sequence[tuple[str, Results]]


def save_plots(directory: Path, runs: Runs) -> list[Path]:
    """Draw each run, a title with its results, as PNG files in `directory`, which is created if needed.

    Returns:
        Paths of latencies.png, load.png, hits.png, queues.png, and, if a run knows its prefill time, prefill.png.

    Raises:
        ConfigError: a file cannot be written.
    """
    drawn = {
        "latencies": latency_figure(runs),
        "load": _stacked(runs, _load, "requests in flight on each engine"),
        "hits": _stacked(runs, _hits, "share of prompt tokens found in the prefix cache"),
        "queues": _stacked(runs, _queues, "requests waiting on each engine"),
    }
    telling = [(title, results) for title, results in runs if results.tells_prefill]
    if telling:
        drawn["prefill"] = _stacked(telling, _prefill, "prefill seconds in each 10 s, busiest and idlest engine")
    files = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            files.append(directory / f"{name}.png")
            figure.savefig(files[-1], dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {directory} cannot be written: {error}") from error
    return files


def latency_figure(runs: Runs) -> Figure:
    """Draw TTFT and TPOT as cumulative shares, one line for each policy."""
    figure = Figure(figsize=(_WIDTH, _ROW + 1), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("ttft_ns", "tpot_ns"), strict=True):
        for title, results in runs:
            values = getattr(results.records().answered, name)
            ranked = np.sort(values[~np.isnan(values)]) / _NS_PER_MS
            axes.step(ranked, np.arange(1, len(ranked) + 1) / max(len(ranked), 1), where="post", label=title)
        axes.set(title=name.removesuffix("_ns").upper(), xlabel="ms", ylabel="share", xscale="log", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    return figure


def _stacked(runs: Runs, draw: Callable[[Axes, Results], None], title: str) -> Figure:
    """Draw a row for each policy, all with the same axes."""
    figure = Figure(figsize=(_WIDTH, _ROW * len(runs) + 0.5), layout="constrained")
    rows = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, results) in zip(rows, runs, strict=True):
        draw(axes, results)
        axes.set(title=name)
    rows[-1].set(xlabel="s")
    figure.suptitle(title)
    return figure


def _load(axes: Axes, results: Results) -> None:
    at_ns = looks(results)
    _lines(axes, at_ns, [results.in_flight(engine, at_ns) for engine in range(results.num_engines)])


def _queues(axes: Axes, results: Results) -> None:
    at_ns = looks(results)
    _lines(axes, at_ns, [results.queue_depth(engine, at_ns) for engine in range(results.num_engines)])


def _prefill(axes: Axes, results: Results) -> None:
    seconds = results.prefill_seconds()
    start_s = np.arange(seconds.shape[1]) * (WINDOW_NS / _NS_PER_S)
    most, least = results.most_different_engines()
    for engine in dict.fromkeys((most, least)):
        axes.step(start_s, seconds[engine], where="post", label=f"engine {engine}")
    axes.legend(loc="upper right")


def _hits(axes: Axes, results: Results) -> None:
    ratio = results.hit_ratio(WINDOW_NS)
    axes.step(np.arange(len(ratio)) * (WINDOW_NS / _NS_PER_S), ratio, where="post")
    axes.set(ylim=(0, 1.02))


def _lines(axes: Axes, at_ns: np.ndarray, values: Sequence[np.ndarray]) -> None:
    at_s = at_ns / _NS_PER_S
    if len(values) <= _MOST_LINES:
        for each in values:
            axes.plot(at_s, each, linewidth=0.8)
        return
    low, middle, high = np.percentile(np.array(values), (0, 50, 100), axis=0)
    axes.fill_between(at_s, low, high, alpha=0.3)
    axes.plot(at_s, middle)
