"""An imitated accelerator: tensors in host memory that behave as if they were on another device.

The room `model` chooses what to do by the device of a tensor, and its path for accelerators must never mix tensors of
the two, read memory that is on its way, or wait for the device in a steady decode. torch's arithmetic runs on the CPU
here, so results are right, and these rules are enforced:

- An operation on tensors of both devices fails, except for a host tensor without dimensions, as in torch.
- A copy to pinned host memory with `non_blocking` happens when an event that was recorded later passes. Until then the
  memory holds a number that no test expects.
- An event passes at the second `query`, or when it is waited for.
- Operations that wait for an accelerator count, and fail within `forbid_waits`.

What it cannot show: kernels, their demands on alignment and their rounding, streams beside the current one, and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
_POISON = 77  # in host memory whose copy has not arrived
# Functions of tensors whose result the host needs, so that it waits.
_WAITS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique", "equal",
     "argwhere", "bincount", "is_nonzero", "allclose", "isin", "__contains__"}
)  # fmt: skip
_PROPERTIES = {"device": DEVICE, "is_cuda": True, "is_cpu": False}


class WaitedError(AssertionError):
    """Something waits for the accelerator where nothing may."""


class _State:
    """Copies that the imitated accelerator has not made yet, and the number of waits for it."""

    def __init__(self) -> None:
        self.under_way: list[tuple[Tensor, Tensor]] = []  # (pinned host memory, what will be there)
        self.num_waits, self.forbids = 0, False

    def wait(self, name: str) -> None:
        if self.forbids:
            raise WaitedError(f"{name} waits for the accelerator")
        self.num_waits += 1
        self.arrive(self.under_way)

    @torch.inference_mode()
    def arrive(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        for copy in list(copies):
            if any(copy is each for each in self.under_way):
                copy[0].copy_(copy[1])
        self.under_way = [each for each in self.under_way if not any(each is copy for copy in copies)]


_STATE = _State()


class FarTensor(Tensor):
    """A tensor on the imitated accelerator. `near`: its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.near = near
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was not caught above")


class _Everywhere(TorchFunctionMode):
    """Catches functions that make tensors from nothing, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _is_far(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _near(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


def _far(value: Any) -> Any:
    return FarTensor(value) if isinstance(value, Tensor) and not isinstance(value, FarTensor) else value


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    of_far = any(isinstance(tensor, FarTensor) for tensor in tensors)
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__" and of_far and owner in _PROPERTIES:
        return _PROPERTIES[owner]
    if name in _SPECIAL:
        return _SPECIAL[name](*args, **kwargs)
    if of_far:
        _check(name, func, args, tensors)
    kwargs = dict(kwargs)
    is_pinned = kwargs.pop("pin_memory", False)
    device = kwargs.get("device")
    to_far = _is_far(device) if device is not None else of_far
    if _is_far(device):
        if name in {"tensor", "as_tensor"}:
            _STATE.wait("a tensor of Python numbers")
        kwargs["device"] = "cpu"
    found = func(*tree_map(_near, args), **tree_map(_near, kwargs))
    if is_pinned:
        found.is_pinned_here = True
    return tree_map(_far, found) if to_far else found


def _check(name: str, func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Fail where torch would, and count what waits."""
    if name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if any(not isinstance(tensor, FarTensor) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    by_mask = name in {"__getitem__", "__setitem__"} and any(
        isinstance(leaf, FarTensor) and leaf.near.dtype == torch.bool for leaf in tree_leaves(args[1])
    )
    # An index of Python numbers is copied there, and so is a number that is assigned at an index that is a tensor.
    in_index = list(args[1]) if name in {"__getitem__", "__setitem__"} and isinstance(args[1], tuple) else [*args[1:2]]
    by_list = name in {"__getitem__", "__setitem__"} and any(isinstance(each, list | np.ndarray) for each in in_index)
    number = (
        name == "__setitem__"
        and not isinstance(args[2], FarTensor)
        and any(isinstance(each, FarTensor) for each in in_index)
    )
    repeats = name == "repeat_interleave" and isinstance(args[-1], Tensor)
    if name in _WAITS or by_mask or by_list or number or repeats or (name == "where" and len(args) == 1):
        _STATE.wait(name)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*tree_map(_near, args), **tree_map(_near, kwargs))
    for other in args:
        if isinstance(other, FarTensor):
            device = DEVICE
    near = _near(tensor) if dtype is None else torch.Tensor.to(_near(tensor), dtype)
    is_far = isinstance(tensor, FarTensor)
    if device is None or _is_far(device) == is_far:
        return FarTensor(near) if is_far and near is not tensor.near else (tensor if is_far else near)
    if not (non_blocking and getattr(tensor, "is_pinned_here", False)):
        _STATE.wait("a copy between pageable memory and the device")
    return FarTensor(near.clone()) if _is_far(device) else near.clone()


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    from_far, to_far = isinstance(source, FarTensor), isinstance(target, FarTensor)
    if from_far == to_far:
        _near(target).copy_(_near(source))
        return target
    host = target if from_far else source
    if not (non_blocking and getattr(host, "is_pinned_here", False)):
        _STATE.wait("a copy between pageable memory and the device")
        _near(target).copy_(_near(source))
    elif from_far:
        assert target.is_contiguous(), "torch copies to host memory with gaps before the data have arrived"
        target.fill_(_POISON)
        _STATE.under_way.append((target, source.near.clone()))
    else:
        target.near.copy_(source)
    return target


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    pinned = tensor.clone()
    pinned.is_pinned_here = True
    return pinned


def _to_cpu(tensor: Tensor) -> Tensor:
    return _to(tensor, "cpu")


_SPECIAL = {
    "_has_compatible_shallow_copy_type": lambda *_: False,  # so that modules make new parameters when they move
    "pin_memory": _pin,
    "to": _to,
    "cpu": _to_cpu,
    "copy_": _copy,
}


class FarEvent:
    """Implements what is used of `torch.cuda.Event`."""

    def __init__(self) -> None:
        self._num_queries = 0

    def record(self, _stream: object) -> None:
        self._before = list(_STATE.under_way)

    def query(self) -> bool:
        self._num_queries += 1
        if self._num_queries < 2:
            return False
        _STATE.arrive(self._before)
        return True

    def synchronize(self) -> None:
        _STATE.arrive(self._before)


class FarStream:
    """Implements what is used of `torch.cuda.Stream`."""

    def synchronize(self) -> None:
        _STATE.wait("a stream")


@contextmanager
def imitated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch find one accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Event", FarEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: FarStream())
    make_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda _device=None: make_generator())
    _STATE.__init__()
    with _Everywhere():
        yield


@contextmanager
def forbid_waits() -> Iterator[None]:
    """Let what waits for the imitated accelerator fail."""
    _STATE.forbids = True
    try:
        yield
    finally:
        _STATE.forbids = False


def num_waits() -> int:
    """How often the imitated accelerator was waited for."""
    return _STATE.num_waits
