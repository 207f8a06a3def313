"""Tensors of the tokens inside the network, between stages, by row and by place (see `core.stages`).

The arena is allocated once, so parked work never asks for memory: as much may be parked as fits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moestro.core.stages import StageShape
from moestro.core.work import Int32s
from moestro.model.experts.routed import add_contributions
from moestro.model.staged.layer_arguments import ColumnForm
from moestro.model.staged.layer_stages import Attended
from moestro.model.upload import upload, upload_tensor

Index = slice | Tensor  # rows or places: a slice where they are consecutive, otherwise int64


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """State that a network keeps of a token between two stages.

    Attributes:
        hidden_size: hidden size of the network.
        num_chosen: experts that a token visits in a layer; 0 for a dense network.
        dtype: dtype of the network.
        keeps_mixed: whether a place keeps the attention's output.
        columns: forms of a row's arguments.
    """

    hidden_size: int
    num_chosen: int
    dtype: torch.dtype
    keeps_mixed: bool
    columns: tuple[ColumnForm, ...]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the gate's weights, which may be more precise than the network."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_size * self.dtype.itemsize + sum(column.num_bytes for column in self.columns)

    @property
    def place_bytes(self) -> int:
        """Bytes of a place; 0 for a dense network, which stores nothing there."""
        if not self.num_chosen:
            return 0
        num_vectors = 1 + self.num_chosen + self.keeps_mixed
        return num_vectors * self.hidden_size * self.dtype.itemsize + self.num_chosen * self.weight_dtype.itemsize

    @property
    def guest_bytes(self) -> int:
        """Bytes of a guest place; 0 for a dense network, which has none."""
        return 0 if not self.num_chosen else (1 + self.num_chosen) * self.hidden_size * self.dtype.itemsize


class Arena:
    """Residual stream and arguments of each row; and for each place the input, weights and answers of its experts.

    Args:
        shape: numbers of rows, places and guest places.
        form: state of a token.
        device: device of the network.
    """

    def __init__(self, shape: StageShape, form: TokenForm, device: torch.device) -> None:
        def tensor(*sizes: int, dtype: torch.dtype = form.dtype) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        num_all = shape.num_places + shape.num_guests if form.num_chosen else 0
        self._device = device
        self._hidden = tensor(shape.num_rows, form.hidden_size)
        self._columns = [tensor(shape.num_rows, *column.sizes, dtype=column.dtype) for column in form.columns]
        self._inputs = tensor(num_all, form.hidden_size)
        self._contributions = tensor(num_all, form.num_chosen, form.hidden_size)
        self._weights = tensor(shape.num_places, form.num_chosen, dtype=form.weight_dtype)
        self._mixed = tensor(shape.num_places if form.keeps_mixed else 0, form.hidden_size)

    @property
    def vector_form(self) -> tuple[int, torch.dtype]:
        """Hidden size and dtype of inputs and contributions."""
        return self._inputs.shape[1], self._inputs.dtype

    def index(self, rows: Int32s) -> Index:
        """Turn `rows` (or places) into an index: a slice where they are consecutive, which copies nothing."""
        num = len(rows)
        if num == 0:
            return slice(0, 0)
        first = int(rows[0])
        if int(rows[-1]) - first == num - 1 and (num < 3 or bool((np.diff(rows) == 1).all())):
            return slice(first, first + num)
        return upload(rows.astype(np.int64), self._device)

    def read_hidden(self, rows: Index) -> Tensor:
        """[tokens, hidden size], read-only."""
        return _read(self._hidden, rows)

    def write_hidden(self, rows: Index, hidden: Tensor) -> None:
        """Store the residual stream of `rows`. `hidden`: [tokens, hidden size]."""
        _write(self._hidden, rows, hidden)

    def read_column(self, column: int, rows: Index) -> Tensor:
        """[tokens, *sizes], read-only, of one of the form's columns."""
        return _read(self._columns[column], rows)

    def write_columns(self, rows: Index, columns: Sequence[Tensor]) -> None:
        """Store the arguments of `rows`. `columns`: [tokens, *sizes] of each column of the form."""
        for mine, given in zip(self._columns, columns, strict=True):
            _write(mine, rows, given)

    def write_attended(self, rows: Index, places: Index, attended: Attended) -> Tensor:
        """Store a layer's state at its gate.

        Returns:
            int64[tokens, k], each token's experts in ascending id.
        """
        assert attended.inputs is not None
        assert attended.topk_ids is not None
        assert attended.topk_weights is not None
        self.write_hidden(rows, attended.hidden)
        ids, order = attended.topk_ids.sort(dim=1)
        _write(self._inputs, places, attended.inputs)
        _write(self._weights, places, attended.topk_weights.gather(1, order).to(self._weights.dtype))
        if attended.mixed is not None:
            _write(self._mixed, places, attended.mixed)
        return ids

    def read_attended(self, rows: Index, places: Index) -> tuple[Attended, Tensor]:
        """Stored state of `write_attended`, and the weighted sum of all contributions [tokens, hidden size]."""
        mixed = _read(self._mixed, places) if len(self._mixed) else None
        weights = _read(self._weights, places)
        attended = Attended(self.read_hidden(rows), _read(self._inputs, places), None, weights, mixed)
        return attended, add_contributions(_read(self._contributions, places), weights)

    def read_inputs(self, places: Int32s) -> Tensor:
        """[n, hidden size], input of the experts at each of `places`, which may repeat."""
        return self._inputs.index_select(0, upload(places.astype(np.int64), self._device))

    def write_inputs(self, places: Int32s, inputs: Tensor) -> None:
        """Store the input of the experts at each of `places`. `inputs`: [n, hidden size], here or on the host."""
        _write(self._inputs, self.index(places), upload_tensor(inputs, self._device))

    def read_contributions(self, places: Int32s, choices: Int32s) -> Tensor:
        """[n, hidden size], one expert's answer for each (place, choice)."""
        return self._by_choice().index_select(0, self._index_choices(places, choices))

    def write_contributions(self, places: Int32s, choices: Int32s, contributions: Tensor) -> None:
        """Store one expert's answer for each (place, choice).

        `contributions`: [n, hidden size], here or on the host.
        """
        answers = upload_tensor(contributions, self._device)
        self._by_choice().index_copy_(0, self._index_choices(places, choices), answers)

    def _by_choice(self) -> Tensor:
        return self._contributions.view(-1, self._contributions.shape[2])

    def _index_choices(self, places: Int32s, choices: Int32s) -> Tensor:
        return upload(places.astype(np.int64) * self._contributions.shape[1] + choices, self._device)


def _read(tensor: Tensor, at: Index) -> Tensor:
    return tensor[at] if isinstance(at, slice) else tensor.index_select(0, at)


def _write(tensor: Tensor, at: Index, values: Tensor) -> None:
    if isinstance(at, slice):
        tensor[at] = values
    else:
        tensor.index_copy_(0, at, values.to(tensor.dtype))
