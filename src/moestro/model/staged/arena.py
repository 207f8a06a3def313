"""Tensors of the tokens inside the network, between stages: by row and by place, and as arguments of layers.

`core.stages` explains rows and places. The arena is allocated once, so parked work never asks for memory: as much may
be parked as fits here.

A network calls its layers with more than hidden states: positions, rotary tables, a step. Two recordings of these
calls, with different numbers of tokens, show which tensors have a token axis. Those are *columns*: one entry per token,
each stored once however many layers take it, and put together again for any tokens. Everything else is the same in both
recordings and is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moestro.core.stages import StageShape
from moestro.core.work import Int32s
from moestro.model.experts.routed import add_contributions
from moestro.model.staged.layer_stages import Attended
from moestro.model.step import PagedStep
from moestro.model.tensors import upload, upload_tensor

Recording = Sequence[dict[str, Any]]  # for each layer, the keyword arguments of its call
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """Entry of a column.

    Attributes:
        sizes: shape of one token's entry.
        dtype: dtype of the column.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one token's entry."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Column:
    """Position of a column in a template.

    Attributes:
        number: number of the column.
        axis: token axis of the argument.
    """

    number: int
    axis: int


class _Step:
    """Position of the step in a template."""


@dataclass(frozen=True, slots=True)
class _Source:
    """First occurrence of a column in a recording.

    Attributes:
        layer: the layer.
        path: keys and indices that lead from the layer's arguments to the tensor.
        axis: token axis of the tensor.
    """

    layer: int
    path: tuple[str | int, ...]
    axis: int


class LayerArguments:
    """Splits the arguments of a recording into columns, and fills them in for other tokens.

    Args:
        first, second: recordings of two steps.
        num_tokens: tokens of the two steps, which differ.

    Raises:
        ValueError: an argument depends on the step, but not by token.

    Attributes:
        columns: form of each column.
        kind_of: for each layer, the number of its kind. Layers of one kind take the same arguments.
    """

    def __init__(self, first: Recording, second: Recording, num_tokens: tuple[int, int]) -> None:
        self.columns: list[ColumnForm] = []
        self._num_tokens = num_tokens
        self._sources: list[_Source] = []
        self._column_of: dict[int, _Column] = {}  # by the id of a tensor of `first`, which lives until all are known
        self._templates: list[dict[str, Any]] = []
        known: dict[tuple[Any, ...], int] = {}
        kinds = []
        for layer, (one, other) in enumerate(zip(first, second, strict=True)):
            leaves: list[Any] = []
            template = self._compare(one, other, (layer,), leaves)
            kind = known.setdefault(tuple(leaves), len(known))
            if kind == len(self._templates):
                self._templates.append(template)
            kinds.append(kind)
        self.kind_of = tuple(kinds)
        self._column_of.clear()

    def split(self, recording: Recording) -> list[Tensor]:
        """[tokens, *sizes] for each column, from the arguments of one step."""
        found = []
        for source in self._sources:
            value: Any = recording[source.layer]
            for key in source.path:
                value = value[key]
            found.append(value.movedim(source.axis, 0))
        return found

    def fill(self, kind: int, read: Callable[[int], Tensor], step: PagedStep | None) -> dict[str, Any]:
        """Make the arguments of the layers of one kind.

        Args:
            kind: number of the kind.
            read: function that returns [tokens, *sizes] of a column by its number.
            step: the step of these tokens. None suffices where no attention runs.
        """
        filled: dict[str, Any] = _fill(self._templates[kind], read, step)
        return filled

    def _compare(self, one: Any, other: Any, path: tuple[str | int, ...], leaves: list[Any]) -> Any:
        """Make the template of one argument, and append what tells it from those of other layers to `leaves`."""
        if type(one) is not type(other):
            raise ValueError(f"argument {_name(path)} has another type in another step")
        if isinstance(one, dict):
            leaves.append(tuple(one))
            return {key: self._compare(value, other.get(key), (*path, key), leaves) for key, value in one.items()}
        if type(one) in (list, tuple):
            leaves.append((type(one), len(one)))
            parts = zip(one, other, strict=True)
            return type(one)(self._compare(a, b, (*path, at), leaves) for at, (a, b) in enumerate(parts))
        if isinstance(one, PagedStep):
            leaves.append(_Step)
            return _Step()
        if isinstance(one, Tensor):
            found = self._compare_tensors(one, other, path)
            leaves.append(found if isinstance(found, _Column) else id(found))
            return found
        if isinstance(one, _SCALARS) and one != other:
            raise ValueError(f"argument {_name(path)} is {one} in one step and {other} in another")
        leaves.append(one if isinstance(one, _SCALARS) else id(one))
        return one

    def _compare_tensors(self, one: Tensor, other: Tensor, path: tuple[str | int, ...]) -> _Column | Tensor:
        if one.shape == other.shape:
            if not torch.equal(one, other):
                raise ValueError(f"argument {_name(path)} has other values in another step, but no token axis")
            return one
        if id(one) in self._column_of:
            return self._column_of[id(one)]
        axes = [axis for axis, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if sizes[0] != sizes[1]]
        if one.dim() != other.dim() or len(axes) != 1 or (one.shape[axes[0]], other.shape[axes[0]]) != self._num_tokens:
            raise ValueError(f"argument {_name(path)} of shape {list(one.shape)} has no single token axis")
        layer, *keys = path
        assert isinstance(layer, int)
        self._sources.append(_Source(layer, tuple(keys), axes[0]))
        sizes = one.movedim(axes[0], 0).shape[1:]
        self.columns.append(ColumnForm(tuple(sizes), one.dtype))
        column = self._column_of[id(one)] = _Column(len(self.columns) - 1, axes[0])
        return column


def _name(path: tuple[str | int, ...]) -> str:
    layer, *keys = path
    return f"{'.'.join(map(str, keys))} of layer {layer}"


def _fill(template: Any, read: Callable[[int], Tensor], step: PagedStep | None) -> Any:
    if isinstance(template, dict):
        return {key: _fill(value, read, step) for key, value in template.items()}
    if type(template) in (list, tuple):
        return type(template)(_fill(value, read, step) for value in template)
    if isinstance(template, _Column):
        return read(template.number).movedim(0, template.axis)
    return step if isinstance(template, _Step) else template


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
    def remote_place_bytes(self) -> int:
        """Bytes of a remote place; 0 for a dense network, which has none."""
        return 0 if not self.num_chosen else (1 + self.num_chosen) * self.hidden_size * self.dtype.itemsize


class Arena:
    """Residual stream and arguments of each row; and for each place the input, weights and answers of its experts.

    Args:
        shape: numbers of rows, places and remote places.
        form: state of a token.
        device: device of the network.
    """

    def __init__(self, shape: StageShape, form: TokenForm, device: torch.device) -> None:
        def tensor(*sizes: int, dtype: torch.dtype = form.dtype) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        num_all = shape.num_places + shape.num_remote_places if form.num_chosen else 0
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
