"""A gate that draws the experts of decode tokens ahead of time, several times as fast as one step at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.token_keys import Keys
from moestro.cost.gate import Gate

Int64s = NDArray[np.int64]

_AHEAD = 32  # positions of a sequence that are drawn at once
_MOST_SINGLE = 96  # tokens; the draws of more fill the CPU's vectors by themselves


class AheadGate:
    """Counts the visits of tokens exactly as a `Gate` does; implements `cost.drawn_step.ExpertGate`.

    A sequence decodes consecutive positions, whose keys are consecutive numbers. The first of them draws for the
    next 32 too. Sequences that have ended are dropped when the memory holds twice as many as were used last.

    Args:
        gate: draws the experts.
        num_layers: layers of the network.
        num_experts: experts of a layer.
    """

    def __init__(self, gate: Gate, num_layers: int, num_experts: int) -> None:
        self._gate, self._layers, self._num_experts = gate, range(num_layers), num_experts
        self._num_cells = num_layers * num_experts
        self._first_cell: Int64s = np.arange(num_layers)[:, None] * num_experts
        # By key // _AHEAD: the cells (layer, expert) that each of the tokens visits, int32[_AHEAD, visits].
        self._drawn: dict[int, NDArray[np.int32]] = {}

    def count(self, tokens: Keys, layers: range) -> Int64s:
        """Count the visits of tokens to experts, int64[len(layers), experts], as `Gate.count`."""
        if len(tokens) > _MOST_SINGLE or layers != self._layers:
            return self._gate.count(tokens, layers)
        drawn, visited = self._drawn, []
        for token in tokens.tolist():
            span, place = divmod(token, _AHEAD)
            cells = drawn.get(span)
            if cells is None:
                cells = drawn[span] = self._draw(span)
            visited.append(cells[place])
        if len(drawn) > 2 * len(tokens) + _MOST_SINGLE:
            self._drawn = {token // _AHEAD: drawn[token // _AHEAD] for token in tokens.tolist()}
        counts = np.bincount(np.concatenate(visited), minlength=self._num_cells)
        return counts.reshape(len(layers), self._num_experts)

    def _draw(self, span: int) -> NDArray[np.int32]:
        keys = np.arange(span * _AHEAD, (span + 1) * _AHEAD, dtype=np.uint64)
        cells = self._gate.choose_layers(keys, self._layers) + self._first_cell
        return cells.reshape(_AHEAD, -1).astype(np.int32)
