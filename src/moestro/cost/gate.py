"""Gates without a network: they draw the experts of each token by popularity, or take them from a recording."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import mix64
from moestro.core.views import true_rows
from moestro.core.work import DOMAIN_SHIFT, Int32s, Keys, Slots, domains_of, positions_of, requests_of
from moestro.native.compiler import GATE_KERNEL
from moestro.native.library_search import INT, POINTER, OptionalKernel, load_functions

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]

_MOST_DRAWS = 1 << 16  # draws at once; more of them, as a long prompt needs for all layers, would not fit the CPU cache
_SCALE = 1 << 30  # popularities are integers of this sum, nearly, so that a 32-bit draw times their sum fits an int64
_DRAW_BITS = np.uint64(32)
_LOW_HALF = np.uint64((1 << 32) - 1)
_TOKEN, _COUNTER = np.uint64(0xD1342543DE82EF95), np.uint64(0x9E3779B97F4A7C15)  # odd, without structure
_PIECES_PER_CELL = 4  # 2 took 8 to 13 ns a point, 4 and 8 took 5 to 11, and `searchsorted` 44 to 99
_MOST_STEPS = 8  # each takes some 4 ns a point
_DRAWS_OF_A_LAYER = 1 << 16  # counters that each layer has; far above any top-k


class Gate(Protocol):
    """Chooses the experts of tokens in all layers; `PopularityGate` and `RecordedGate` implement it."""

    num_chosen: int

    def choose_layers(self, tokens: Keys, layers: range) -> Int32s:
        """int32[tokens, len(layers), num_chosen], experts of each token, ascending."""
        ...

    def count(self, tokens: Keys, layers: range) -> Int64s:
        """int64[len(layers), num_experts], tokens that visit each expert."""
        ...


class _GateStruct(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("num_domains", "num_layers", "num_experts", "num_chosen")),
        *((name, POINTER) for name in ("length", "start", "end", "row_length", "first_of_piece")),
        *((name, INT) for name in ("piece_shift", "domain_shift")),
        ("seed", ctypes.c_uint64),
    ]


class GateKernel:
    """The compiled draws of a `PopularityGate`.

    Args:
        path: the compiled file.

    Raises:
        OSError: the file is no library of the kernel.
    """

    def __init__(self, path: Path) -> None:
        arguments = (POINTER, POINTER, INT, INT, INT, POINTER)
        functions = load_functions(path, {"choose": arguments, "count": arguments})
        self.choose, self.count = functions["choose"], functions["count"]


gate_kernel = OptionalKernel(GATE_KERNEL, GateKernel)


class PopularityGate:
    """Chooses experts. A token's choice in a layer depends only on the seed, its key and the layer.

    The choice is therefore the same in any batch, engine and mode, with or without preemption. Each further expert is
    drawn by popularity among those not chosen yet, which is the distribution of the first of exponential clocks.

    Args:
        popularity: float64[num_experts], [layers, num_experts] or [domains, layers, num_experts]; each row sums to 1.
            A row holds nearly a token's chances, since it chooses no expert twice. One layer stands for all.
        num_chosen: experts that a token visits in a layer.
        seed: seed of the draws.

    Attributes:
        num_chosen: experts that a token visits in a layer.

    Raises:
        ValueError: fewer than `num_chosen` experts have a popularity above 0, or a row does not sum to 1.
    """

    def __init__(self, popularity: Floats, num_chosen: int, seed: int = 0) -> None:
        rows = popularity.reshape((1, 1, *popularity.shape)[-3:])
        self._num_domains, self._num_layers, self._num_experts = rows.shape
        self.num_chosen = num_chosen
        if int((rows > 0).sum(axis=-1).min()) < num_chosen:
            raise ValueError(f"a token chooses {num_chosen} experts, but fewer have a popularity above 0")
        if not (rows >= 0).all() or not np.allclose(rows.sum(axis=-1), 1.0):
            raise ValueError("the popularities of a layer's experts must be at least 0, and sum to 1")
        # The experts of all rows lie end to end on a line, each as long as it is popular. A *cell* is one of them.
        self._length: Int64s = np.maximum(np.rint(rows * _SCALE), rows > 0).astype(np.int64).ravel()
        self._end: Int64s = self._length.cumsum()
        self._start: Int64s = self._end - self._length
        self._cells = CellIndex(self._end)
        self._row_length: Int64s = self._length.reshape(-1, self._num_experts).sum(axis=-1)
        self._seed = mix64(np.array([seed], np.uint64))

    def choose(self, tokens: Keys, layer: int) -> Int32s:
        """Choose the experts of tokens in one layer.

        Args:
            tokens: uint64[tokens], keys of `core.work`.
            layer: the layer.

        Returns:
            int32[tokens, num_chosen], experts of each token, ascending.
        """
        chosen: Int32s = self.choose_layers(tokens, range(layer, layer + 1))[:, 0]
        return chosen

    def choose_layers(self, tokens: Keys, layers: range) -> Int32s:
        """int32[tokens, len(layers), num_chosen], `choose` of each of consecutive layers."""
        self._check(tokens, layers)
        if (kernel := gate_kernel.look()) is not None:
            found = np.empty((len(tokens), len(layers), self.num_chosen), np.int32)
            kernel.choose(*self._arguments(tokens, layers), found.ctypes.data)
            return found
        numbers = np.arange(layers.start, layers.stop)[:, None]
        row = self._rows(tokens, numbers)
        chosen = np.empty((len(tokens), len(layers), self.num_chosen), np.int32)
        for at, cells in enumerate(self._draw(tokens, numbers, row)):
            chosen[:, :, at] = (cells - row * self._num_experts).T
        return chosen

    def count(self, tokens: Keys, layers: range) -> Int64s:
        """Count the visits of tokens to experts.

        Args:
            tokens: uint64[tokens], keys of `core.work`.
            layers: consecutive layers.

        Returns:
            int64[len(layers), num_experts], tokens that visit each expert.
        """
        self._check(tokens, layers)
        num_experts = self._num_experts
        counts = np.zeros((len(layers), num_experts), np.int64)
        if (kernel := gate_kernel.look()) is not None:
            kernel.count(*self._arguments(tokens, layers), counts.ctypes.data)
            return counts
        at_once = max(_MOST_DRAWS // max(len(tokens) * self.num_chosen, 1), 1)
        for first in range(0, len(layers), at_once):
            some = np.array(layers[first : first + at_once])[:, None]
            row = self._rows(tokens, some)
            to_counts = (np.arange(len(some))[:, None] - row) * num_experts
            for cells in self._draw(tokens, some, row):
                counted = np.bincount((cells + to_counts).ravel(), minlength=len(some) * num_experts)
                counts[first : first + len(some)] += counted.reshape(len(some), num_experts)
        return counts

    def _check(self, tokens: Keys, layers: range) -> None:
        """Raise IndexError for layers and domains that the gate does not have."""
        if layers.start < 0 or (self._num_layers > 1 and layers.stop > self._num_layers):
            raise IndexError(f"layers {layers.start} to {layers.stop} of {self._num_layers}")
        last_domain = int(tokens.max(initial=0)) >> DOMAIN_SHIFT
        if self._num_domains > 1 and last_domain >= self._num_domains:
            raise IndexError(f"a token of domain {last_domain}, and there are {self._num_domains}")

    def _arguments(self, tokens: Keys, layers: range) -> tuple[object, ...]:
        """Arguments of the kernel's functions but for the result."""
        keys = np.ascontiguousarray(tokens, np.uint64)
        sizes = (self._num_domains, self._num_layers, self._num_experts, self.num_chosen)
        arrays = (self._length, self._start, self._end, self._row_length, self._cells.first_of_piece)
        addresses = (each.ctypes.data for each in arrays)
        struct = _GateStruct(*sizes, *addresses, self._cells.piece_shift, DOMAIN_SHIFT, int(self._seed[0]))
        return ctypes.byref(struct), keys.ctypes, len(keys), layers.start, len(layers)

    def _rows(self, tokens: Keys, layers: Int64s) -> Int64s:
        """int64[layers, tokens or 1], row of popularities of each token in each of int64[layers, 1]."""
        row = layers if self._num_layers > 1 else np.zeros_like(layers)
        return row if self._num_domains == 1 else row + self._num_layers * domains_of(tokens)

    def _draw(self, tokens: Keys, layers: Int64s, row: Int64s) -> list[Int64s]:
        """`num_chosen` arrays of cells, int64[layers, tokens], in ascending order."""
        first, left = self._start.take(row * self._num_experts), self._row_length.take(row)
        chosen: list[Int64s] = []
        for draws in self._uniform(tokens, layers):
            at: Int64s = first + (draws * left >> 32)  # a point among what is left of the row
            for cells in chosen:  # in ascending order: step over what was chosen before
                at = at + self._length.take(cells) * (at >= self._start.take(cells))
            cells = self._cells.find(at)
            left = left - self._length.take(cells)
            for i, other in enumerate(chosen):
                chosen[i], cells = np.minimum(other, cells), np.maximum(other, cells)
            chosen.append(cells)
        return chosen

    def _uniform(self, tokens: Keys, layers: Int64s) -> list[Int64s]:
        """`num_chosen` arrays of draws from 0 .. 2**32 - 1, int64[layers, tokens]; a hash holds two draws."""
        draws: list[Int64s] = []
        scrambled = tokens * _TOKEN
        for pair in range((self.num_chosen + 1) // 2):
            counter = (layers * _DRAWS_OF_A_LAYER + pair).astype(np.uint64)
            state = mix64(scrambled + (counter * _COUNTER + self._seed))
            draws.append((state >> _DRAW_BITS).view(np.int64))
            draws.append((state & _LOW_HALF).view(np.int64))
        return draws[: self.num_chosen]


class RecordedGate:
    """Gives the tokens of a request the recorded choices of an answer, in order and again from its first token on.

    So consecutive tokens and consecutive layers share experts as they did in the recorded network.

    Args:
        choices: uint8[tokens, layers, num_chosen], experts of recorded tokens.
        answers: for each domain, int64[answers, 2]: first token and number of tokens of each of its answers.
        num_experts: experts of a layer.
        shift_layers: whether each layer takes the choices of other tokens than the layers beside it. The popularity of
            experts and the runs of a layer stay, and its affinity to other layers is gone.
        seed: seed of the answer that a request gets, and of the shifts.

    Attributes:
        num_chosen: experts that a token visits in a layer.
    """

    def __init__(
        self,
        choices: NDArray[np.uint8],
        answers: Sequence[Int64s],
        num_experts: int,
        *,
        shift_layers: bool = False,
        seed: int = 0,
    ) -> None:
        num_tokens, num_layers, self.num_chosen = choices.shape
        self._choices = np.sort(choices, axis=-1)
        self._num_experts = num_experts
        self._answers = np.concatenate(answers)
        sizes = np.array([len(each) for each in answers])
        self._num_answers, self._first_answer = sizes, sizes.cumsum() - sizes
        shift: Int64s = np.random.default_rng(seed).integers(0, num_tokens, size=(num_layers,))
        self._shift = shift if shift_layers else np.zeros_like(shift)
        self._seed = np.uint64(seed)

    def choose_layers(self, tokens: Keys, layers: range) -> Int32s:
        """int32[tokens, len(layers), num_chosen], experts of each token, ascending."""
        numbers = np.arange(layers.start, layers.stop)
        rows = (self._rows(tokens)[:, None] + self._shift[numbers]) % len(self._choices)
        chosen: Int32s = self._choices[rows, numbers].astype(np.int32)
        return chosen

    def count(self, tokens: Keys, layers: range) -> Int64s:
        """int64[len(layers), num_experts], tokens that visit each expert."""
        cells = self.choose_layers(tokens, layers) + np.arange(len(layers))[:, None] * self._num_experts
        return np.bincount(cells.ravel(), minlength=len(layers) * self._num_experts).reshape(len(layers), -1)

    def _rows(self, tokens: Keys) -> Int64s:
        """int64[tokens], recorded token of each token."""
        domain = domains_of(tokens) % len(self._num_answers)
        drawn = (mix64(requests_of(tokens) * _TOKEN + self._seed) >> _DRAW_BITS).astype(np.int64)
        answer = self._first_answer[domain] + drawn % self._num_answers[domain]
        first, length = self._answers[answer].T
        rows: Int64s = first + positions_of(tokens) % length
        return rows


class CellIndex:
    """Finds the cells of points on a line as `searchsorted` does, some ten times as fast.

    The line is cut into pieces of equal length. A table has the cell at the beginning of each piece; each end of
    a cell between there and the point is one cell more.

    Args:
        end: int64[cells], where each cell ends, ascending. The first begins at 0.

    Attributes:
        first_of_piece: int64[pieces], cell at the beginning of each piece.
        piece_shift: binary logarithm of a piece's length.
    """

    def __init__(self, end: Int64s) -> None:
        self._end, length = end, int(end[-1])
        self.piece_shift = max((length // (_PIECES_PER_CELL * len(end))).bit_length() - 1, 0)
        pieces = np.arange((length >> self.piece_shift) + 1) << self.piece_shift
        self.first_of_piece: Int64s = end.searchsorted(pieces, side="right")
        self._num_steps = int(np.diff(self.first_of_piece, append=len(end) - 1).max())

    def find(self, at: Int64s) -> Int64s:
        """Return the cells, int64, of points from 0 to the end of the line, any shape."""
        if self._num_steps > _MOST_STEPS:  # many cells are far shorter than the others
            return self._end.searchsorted(at, side="right")
        cells: Int64s = self.first_of_piece.take(at >> self.piece_shift)
        for _ in range(self._num_steps):
            cells = cells + (at >= self._end.take(cells))
        return cells


class DecodeChoices:
    """Choices of tokens that sequences decode, drawn for all layers when a token first asks.

    A token asks once in every layer, so one draw for all layers is several times as fast as a draw for each.

    Args:
        gate: draws the experts.
        num_layers: layers of the network.
    """

    def __init__(self, gate: PopularityGate, num_layers: int) -> None:
        self._gate, self._layers = gate, range(num_layers)
        # By slot: the token that was drawn last, and its experts.
        self._key: Keys = np.zeros(0, np.uint64)
        self._is_drawn = np.zeros(0, np.bool_)
        self._chosen: Int32s = np.zeros((0, num_layers, gate.num_chosen), np.int32)

    def choose(self, slots: Slots, tokens: Keys, layer: int) -> Int32s:
        """Implement `PopularityGate.choose` for one token of each of distinct `slots`, int64[tokens]."""
        if int(slots.max()) >= len(self._key):
            self._grow(2 * int(slots.max()) + 2)
        misses = true_rows((self._key.take(slots) != tokens) | ~self._is_drawn.take(slots))
        if len(misses):
            slot, key = slots[misses], tokens[misses]
            self._chosen[slot] = self._gate.choose_layers(key, self._layers)
            self._key[slot], self._is_drawn[slot] = key, True
        chosen: Int32s = self._chosen[slots, layer]
        return chosen

    def _grow(self, num_slots: int) -> None:
        added = num_slots - len(self._key)
        self._key = np.append(self._key, np.zeros(added, np.uint64))
        self._is_drawn = np.append(self._is_drawn, np.zeros(added, np.bool_))
        self._chosen = np.append(self._chosen, np.zeros((added, *self._chosen.shape[1:]), np.int32), axis=0)


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
