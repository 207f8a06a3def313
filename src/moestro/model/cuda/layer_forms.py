"""Finds layers that make the same launches on other weights, so that one recorded layer can be replayed for all.

A layer is run once, and every operation and launch is listed. A tensor that the run has not made is a weight, a pool or
other memory of the layer. Layers whose lists differ in nothing but such memory, at arguments that kernels may find by
their addresses, have one form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moestro.model.cuda.functions import KERNEL_DTYPES
from moestro.model.cuda.launch import Grid, Launcher, replace_launcher
from moestro.model.cuda.source.addresses import FOUND

_ALIGNMENT = 16  # bytes, which `find` promises
_TYPES = {kind: dtype for dtype, kind in KERNEL_DTYPES.items()}
_SPACING = 2  # addresses in 16 bytes, so that all are aligned alike
MOST_FORMS = 4


@dataclass(frozen=True, slots=True, eq=False)
class LayerForm:
    """Layers of one form.

    Attributes:
        layers: The layers, ascending. The first one is recorded for all.
        places: By address of a tensor of the first layer, the number of the tensor among those that differ by layer.
        rows: int64[tensors, 2] of each layer: first the address of its tensor.
    """

    layers: tuple[int, ...]
    places: dict[int, int]
    rows: dict[int, Tensor]


class FoundArguments:
    """Memory of the addresses that launches of a recorded layer read, and the launches that read them.

    Args:
        num_places: Most tensors of a form.
        device: The device.

    Attributes:
        memory: int64[num_places, 2], the addresses for the layer that runs next.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self.memory = torch.zeros(max(num_places, 1), _SPACING, dtype=torch.int64, device=device)
        self._places = [self.memory[place, :1].view(torch.uint64) for place in range(num_places)]

    @contextmanager
    def by_address(self, form: LayerForm) -> Iterator[None]:
        """Let kernels find what differs between the layers of a form by its address."""

        def launcher(kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            found = list(args)
            for at, each in _found(kernel, args, options):
                place = form.places.get(each.data_ptr())
                if place is not None:
                    found[at] = self._places[place]
            before(kernel, grid, tuple(found), options)

        before = replace_launcher(launcher)
        try:
            yield
        finally:
            replace_launcher(before)


def find_forms(runs: Sequence[Callable[[], object]], device: torch.device) -> list[LayerForm]:
    """Find the forms of layers, those of most layers first.

    Args:
        runs: A run of each layer.
        device: Device of the addresses.

    Returns:
        At most MOST_FORMS forms. Layers of others are not worth a graph.
    """
    by_list: dict[Hashable, list[tuple[int, list[int]]]] = {}
    for layer, run in enumerate(runs):
        run()  # what is made once is made here
        listing = _Listing()
        listing.list(run)
        by_list.setdefault(tuple(listing.entries), []).append((layer, listing.addresses))
    groups = sorted(by_list.values(), key=len, reverse=True)
    if len(groups) > MOST_FORMS:
        groups = [group for group in groups[:MOST_FORMS] if len(group) > 1]
    return [_form(group, device) for group in groups]


def _form(group: list[tuple[int, list[int]]], device: torch.device) -> LayerForm:
    table = torch.tensor([addresses for _, addresses in group], dtype=torch.int64)
    table = table.reshape(len(group), -1)
    differs = (table != table[:1]).any(0)
    table = table[:, differs]
    rows = torch.zeros(*table.shape, _SPACING, dtype=torch.int64)
    rows[..., 0] = table
    layers = tuple(layer for layer, _ in group)
    places = {address: place for place, address in enumerate(table[0].tolist())}
    return LayerForm(layers, places, dict(zip(layers, rows.to(device), strict=True)))


class _Listing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists what a run does.

    Attributes:
        entries: Operations and launches, without the addresses that kernels may find.
        addresses: These, each once, in the order of their first use.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Hashable] = []
        self.addresses: list[int] = []
        # Tensors that the run has made live until it is over, so that no two have one address.
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._launcher: Launcher | None = None
        self._is_launching = False  # what a launcher does is not the layer's

    def list(self, run: Callable[[], object]) -> None:
        """List a run."""
        self._launcher = replace_launcher(self._launch)
        try:
            with self:
                run()
        finally:
            replace_launcher(self._launcher)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._is_launching:
            return found
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and _storage(each) not in given:
                self._made.setdefault(_storage(each), (len(self._made), each))
        if not func.is_view:
            self.entries.append((str(func), self._describe(args), self._describe(sorted(kwargs.items()))))
        return found

    def _launch(self, kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        places = {
            at: self._place(each) for at, each in _found(kernel, args, options) if _storage(each) not in self._made
        }
        described = tuple(places.get(at) or self._describe(each) for at, each in enumerate(args))
        self.entries.append((kernel.fn.__name__, grid, described, self._describe(sorted(options.items()))))
        assert self._launcher is not None
        self._is_launching = True
        self._launcher(kernel, grid, args, options)
        self._is_launching = False

    def _place(self, tensor: Tensor) -> Hashable:
        address = tensor.data_ptr()
        if address not in self.addresses:
            self.addresses.append(address)
        return ("found", self.addresses.index(address), *_shape(tensor))

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            made = self._made.get(_storage(value))
            where = ("at", value.data_ptr()) if made is None else ("made", made[0], value.storage_offset())
            return (*where, *_shape(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._describe, value))
        return value if isinstance(value, Hashable) else repr(value)


def _found(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[int, Tensor]]:
    """(place, tensor) of the arguments that a kernel may find by their addresses."""
    names = kernel.arg_names
    types = {name: str(each.dtype) for name, each in zip(names, args, strict=False) if isinstance(each, Tensor)}
    types |= {name: str(_TYPES[kind]) for name, kind in options.items() if name == "KIND"}
    types["STORED"] = str(torch.float8_e4m3fn) if options.get("WIDTH") else types.get("rows", "")
    found = []
    for name, like in FOUND.get(kernel.fn.__name__, {}).items():
        at = names.index(name)
        tensor: Tensor = args[at]
        is_aligned = tensor.numel() > 0 and tensor.data_ptr() % _ALIGNMENT == 0
        if is_aligned and str(tensor.dtype) == types.get(like, f"torch.{like}"):
            found.append((at, tensor))
    return found


def _shape(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
