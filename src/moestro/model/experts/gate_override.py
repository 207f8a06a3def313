"""Expert choices that replace the gate's, to study skewed loads on any checkpoint. NumPy only.

A choice is a function of (seed, layer, position, token id) and never of the batch, the schedule or a restart. Modes
that run the same tokens under the same override therefore visit the same experts, and their outputs compare.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import mix64, uniform
from moestro.errors import ConfigError

_FORMS = "uniform, exponential:LAMBDA (LAMBDA >= 0), or trace:FILE (.npy or .npz)"
_RANKS, _DRAWS, _ROWS = (np.uint64(n) for n in range(3))  # separate the keys of different uses


@dataclass(frozen=True, kw_only=True, slots=True)
class GateShape:
    """The gates of one network.

    Attributes:
        layers: indices of the layers that have experts, ascending.
        num_experts: experts of each layer.
        num_chosen: experts that a token visits in a layer.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int


class GateOverride(Protocol):
    """Chooses experts in place of the gates."""

    def choose(self, positions: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """int64[layers with experts, tokens, chosen], distinct expert ids for each token."""
        ...


class ExponentialGate:
    """Draws distinct experts with weights exp(-decay * rank), where a layer's ranks are a keyed shuffle of its experts.

    With decay 0 the draw is uniform. A draw without replacement is an exponential race: expert e finishes after a time
    drawn with rate weight(e), and the first `num_chosen` to finish are chosen, in that order. Times are compared by
    their logarithms, so that no weight underflows.

    Args:
        decay: LAMBDA of `exponential:LAMBDA`, >= 0.
        shape: the network's gates.
        seed: seed of ranks and draws.
    """

    def __init__(self, decay: float, shape: GateShape, seed: int) -> None:
        self._shape = shape
        self._layer_seeds = _layer_keys(seed, shape.layers, _DRAWS)
        self.ranks = _shuffled_ranks(seed, shape)
        self._log_weights = -decay * self.ranks

    def choose(self, positions: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Implement `GateOverride`."""
        tokens = _token_keys(positions, token_ids)
        experts = np.arange(self._shape.num_experts, dtype=np.uint64)
        chosen = np.empty((len(self._shape.layers), len(tokens), self._shape.num_chosen), np.int64)
        for at, (seed, log_weights) in enumerate(zip(self._layer_seeds, self._log_weights, strict=True)):
            draws = uniform(mix64(tokens ^ seed)[:, None], experts).clip(2.0**-54)  # 0 has no logarithm
            chosen[at] = _smallest(np.log(-np.log1p(-draws)) - log_weights, self._shape.num_chosen)
        return chosen


class TraceGate:
    """Replays recorded expert choices: each token takes one whole recorded row, selected by its position and id.

    A recording that names the token of each row gives a token a row of its own id, and one that was not recorded any
    row. So the load of a server follows what its requests are about, as recorded.

    Args:
        path: a `.npy` file of integers, [recorded tokens, layers with experts, chosen]; or an `.npz` file with this
            array as `experts`, and `token_ids`, integers [recorded tokens].
        shape: the network's gates, which the recording must match.
        seed: seed of the selection.

    Raises:
        ConfigError: the file cannot be read or does not fit the network.
    """

    def __init__(self, path: Path, shape: GateShape, seed: int) -> None:
        rows, token_ids = _read_trace(path, shape)
        self._rows, self._num_rows, self._ids = rows, len(rows), np.empty(0, np.int64)
        if token_ids is not None:
            order = token_ids.argsort(kind="stable")
            self._rows = rows[order]
            self._ids, self._first, self._count = np.unique(token_ids[order], return_index=True, return_counts=True)
        self._seed = _layer_keys(seed, (0,), _ROWS)

    def choose(self, positions: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Implement `GateOverride`."""
        draws = uniform(self._seed, _token_keys(positions, token_ids))
        first, count = np.zeros(len(draws), np.int64), np.full(len(draws), self._num_rows)
        if len(self._ids):
            at = np.minimum(self._ids.searchsorted(token_ids), len(self._ids) - 1)
            is_known = self._ids[at] == token_ids
            first, count = np.where(is_known, self._first[at], 0), np.where(is_known, self._count[at], self._num_rows)
        chosen: NDArray[np.int64] = self._rows[first + (draws * count).astype(np.int64)].transpose(1, 0, 2)
        return chosen.astype(np.int64)


def check_spec(spec: str) -> None:
    """Check the form of `spec`; loading the model reads the files.

    Raises:
        ConfigError: `spec` is malformed.
    """
    kind, _, value = spec.partition(":")
    if spec == "uniform" or (kind == "exponential" and _is_decay(value)):
        return
    if kind == "trace" and value.endswith((".npy", ".npz")):
        return
    hint = " Unpack it first (zstd -d)." if kind == "trace" and value.endswith(".zst") else ""
    raise ConfigError(f"--gate-override {spec!r} is unknown: give {_FORMS}.{hint}")


def make_override(spec: str, shape: GateShape, seed: int) -> GateOverride:
    """Make the override that `spec` names, for a network with these gates.

    Raises:
        ConfigError: `spec` is malformed, the network has no experts, or a trace does not fit it.
    """
    check_spec(spec)
    if not shape.layers:
        raise ConfigError(f"--gate-override {spec}: this model has no experts to choose. Drop the flag.")
    kind, _, value = spec.partition(":")
    if kind == "trace":
        return TraceGate(Path(value), shape, seed)
    return ExponentialGate(float(value or 0), shape, seed)


def _is_decay(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _layer_keys(seed: int, layers: tuple[int, ...], use: np.uint64) -> NDArray[np.uint64]:
    base = mix64(np.array([seed], np.uint64))
    return mix64(base ^ (np.array(layers, np.uint64) << np.uint64(2) | use))


def _token_keys(positions: NDArray[np.int64], token_ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """uint64[tokens], one key for each (position, token id), injective because both are below 2**32."""
    return positions.astype(np.uint64) << np.uint64(32) | token_ids.astype(np.uint64)


def _shuffled_ranks(seed: int, shape: GateShape) -> NDArray[np.int64]:
    """int64[layers, experts]: each row a permutation, so that hot experts differ from layer to layer."""
    keys = _layer_keys(seed, shape.layers, _RANKS)
    draws = uniform(keys[:, None], np.arange(shape.num_experts, dtype=np.uint64))
    return draws.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")


def _smallest(times: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """int64[tokens, count]: columns of each row's smallest entries, ascending by entry."""
    if count < times.shape[1]:
        first = np.argpartition(times, count - 1, axis=1)[:, :count]
    else:
        first = np.broadcast_to(np.arange(count), times.shape)
    return np.take_along_axis(first, np.take_along_axis(times, first, 1).argsort(axis=1, kind="stable"), 1)


def _read_trace(path: Path, shape: GateShape) -> tuple[NDArray[np.integer], NDArray[np.int64] | None]:
    """Return the recorded rows, and the token of each, or None."""
    name = f"--gate-override trace:{path}"
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = [found] if isinstance(found, np.ndarray) else [found["experts"], found["token_ids"]]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{name} cannot be read as an array, or as `experts` and `token_ids`: {error}") from error
    rows = arrays[0]
    wanted = (len(shape.layers), shape.num_chosen)
    if rows.ndim != 3 or rows.shape[1:] != wanted or not len(rows) or rows.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} holds {rows.dtype}{list(rows.shape)}, but this model needs integers"
            f" [tokens >= 1, {wanted[0]} layers with experts, {wanted[1]} experts a token]."
        )
    if rows.min() < 0 or rows.max() >= shape.num_experts:
        raise ConfigError(
            f"{name} names experts {rows.min()} .. {rows.max()}, but this model has 0 .. {shape.num_experts - 1}."
        )
    if (np.diff(np.sort(rows, axis=2), axis=2) == 0).any():
        raise ConfigError(f"{name}: some token names one expert twice in a layer.")
    if len(arrays) == 1:
        return np.asarray(rows), None
    token_ids = arrays[1]
    if token_ids.shape != rows.shape[:1] or token_ids.dtype.kind not in "iu":
        raise ConfigError(
            f"{name} has token_ids {token_ids.dtype}{list(token_ids.shape)}, and needs an integer for each of the"
            f" {len(rows)} rows."
        )
    return np.asarray(rows), token_ids.astype(np.int64)
