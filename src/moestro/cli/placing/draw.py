"""The picture of a placement. The extra `plots` is needed; the verb imports this module only to draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

from moestro.cli.placing.question import PlaceQuestion
from moestro.cli.placing.verb import PlaceAnswer
from moestro.errors import ConfigError
from moestro.placement.score import PlaceScore

_SIZE = (12.0, 8.0)
_DRAWN_PAIRS = 150  # more lines hide each other
_HOTTEST = 2.0  # load over mean at the end of the colours


def save_placement(path: Path, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    """Draw load by layer and device before and after, the strongest pairs of experts, and what each layer moves.

    Raises:
        ConfigError: The file cannot be written.
    """
    figure = Figure(figsize=_SIZE, layout="constrained")
    (before, after), (pairs, budget) = figure.subplots(2, 2)
    for axes, title, score in ((before, "before", answer.change.before), (after, "after", answer.change.after)):
        image = _draw_load(axes, question, score)
        axes.set_title(f"Load {title}: balance {score.mean_balance:.3f}")
    figure.colorbar(image, ax=[before, after], label="tokens of a device / mean of its layer")
    _draw_pairs(pairs, question, answer)
    _draw_budget(budget, question, answer)
    model = question.profile.model or question.network.name
    figure.suptitle(f"{model} on {question.view.devices.num_devices} devices, placed by {Path(answer.policy).name}")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: the name ends in no form of picture that matplotlib knows
        raise ConfigError(f"--png {path} cannot be written: {error}") from error


def _draw_load(axes: Axes, question: PlaceQuestion, score: PlaceScore) -> AxesImage:
    mean = np.maximum(score.tokens.mean(axis=1, keepdims=True), 1e-300)
    image = axes.imshow(
        score.tokens / mean, aspect="auto", cmap="RdBu_r", vmin=2 - _HOTTEST, vmax=_HOTTEST, interpolation="nearest"
    )
    _name_layers(axes.yaxis, question)
    live = np.flatnonzero(question.view.devices.is_alive)
    every = max(1, len(live) // 16)
    axes.set_xticks(range(0, len(live), every), [str(device) for device in live[::every]])
    axes.set_xlabel("device")
    return image


def _name_layers(axis: Axis, question: PlaceQuestion) -> None:
    layers = question.profile.layers
    every = max(1, len(layers) // 12)
    axis.set_ticks(range(0, len(layers), every), labels=[str(layer) for layer in layers[::every]])
    axis.set_label_text("layer")


def _draw_pairs(axes: Axes, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    """Draw the strongest pairs as lines between the experts of neighbouring layers, coloured by distance."""
    pairs = question.profile.load.pairs
    axes.set_ylabel("expert")
    _name_layers(axes.xaxis, question)
    if pairs is None or not len(pairs.count):
        axes.text(0.5, 0.5, "the profile has no pairs of experts", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    strongest = np.argsort(-pairs.count, kind="stable")[:_DRAWN_PAIRS]
    layer, first, second = pairs.layer[strongest], pairs.expert[strongest], pairs.next_expert[strongest]
    together = _is_together(answer, layer, first, second)
    width = 2.5 * pairs.count[strongest] / pairs.count[strongest[0]]
    ends = np.stack([np.stack([layer, first], axis=1), np.stack([layer + 1, second], axis=1)], axis=1)
    for kind, color, label in ((together, "C2", "share a device"), (~together, "0.7", "on different devices")):
        axes.add_collection(LineCollection(list(ends[kind]), linewidths=width[kind], colors=color, label=label))
    axes.set(xlim=(-0.3, question.profile.num_layers - 0.7), ylim=(-1, question.profile.num_experts))
    axes.set_title(f"The {len(strongest)} strongest pairs of neighbouring layers")
    axes.legend(fontsize="small", loc="upper right")


def _is_together(
    answer: PlaceAnswer, layer: NDArray[np.int32], first: NDArray[np.int32], second: NDArray[np.int32]
) -> NDArray[np.bool_]:
    has = answer.table.num_copies > 0
    both: NDArray[np.bool_] = has[:, layer, first] & has[:, layer + 1, second]
    together: NDArray[np.bool_] = np.logical_or.reduce(both, axis=0)
    return together


def _draw_budget(axes: Axes, question: PlaceQuestion, answer: PlaceAnswer) -> None:
    moved = np.bincount(answer.change.moves.layer, minlength=question.profile.num_layers)
    layers = np.arange(question.profile.num_layers)
    axes.bar(layers, moved, color="C0", alpha=0.6, label="copies that move")
    axes.set_ylabel("copies that move")
    times = axes.twinx()
    for score, color, name in ((answer.change.before, "C3", "before"), (answer.change.after, "C2", "after")):
        times.plot(layers, (score.compute_s + score.exchange_s) * 1e6, color=color, label=f"time {name}")
    times.set(ylabel="µs of the layer", ylim=(0, None))
    _name_layers(axes.xaxis, question)
    axes.set_title("What each layer moves, and gains")
    times.legend(fontsize="small", loc="lower right")
