"""Keyword arguments of a network's layers, stored by token and put together again for any tokens.

A network calls its layers with more than hidden states: positions, rotary tables, a step. Two recordings of these
calls, with different numbers of tokens, show which tensors have a token axis. Those are *columns*: one entry per token,
each stored once however many layers take it. Everything else is the same in both recordings and is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moestro.model.step import PagedStep

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
