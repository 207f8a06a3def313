"""An imitated accelerator: tensors in host memory that behave as if they were on another device.

The room `model` chooses what to do by the device of a tensor, and its path for accelerators must never mix tensors of
the two, read memory that is on its way, or wait for the device in a steady decode. torch's arithmetic runs on the CPU
here, so results are right, and these rules are enforced:

- An operation on tensors of both devices fails, except for a host tensor without dimensions, as in torch.
- A copy to pinned host memory with `non_blocking` happens when an event that was recorded later passes. Until then the
  memory holds a number that no test expects.
- An event passes at the second `query`, or when it is waited for.
- Operations that wait for an accelerator count, and fail within `forbid_waits`.
- Operations of different streams on the same memory, of which one writes, need an event or a wait between them.
- Nothing may be allocated there, pinned or recorded before `torch.cuda.set_device`.
- Masked attention fails while torch may choose cuDNN, which would build a plan for each shape.
- Tensors there take the memory of a card, of which nothing more can be allocated when it is full.

A process among several cards uses one of them: the one that it names first is that of all its tensors.

What it cannot show: kernels, their demands on alignment and their rounding, temporary memory of kernels, and time.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import triton_interpreter
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moestro.model.cuda.tiles import launch_now, replace_launcher

DEVICE = torch.device("cuda", 0)
POISON = 77  # in host memory whose copy has not arrived
# Functions of tensors whose result the host needs, so that it waits.
_WAITS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique", "equal",
     "argwhere", "bincount", "is_nonzero", "allclose", "isin", "__contains__"}
)  # fmt: skip
_PROPERTIES = {"device": lambda: _STATE.card, "is_cuda": lambda: True, "is_cpu": lambda: False}


class WaitedError(AssertionError):
    """Something waits for the accelerator where nothing may."""


class RaceError(AssertionError):
    """Two streams use the same memory, and no event orders them."""


Clock = dict[int, int]  # operations of each stream, by its number, that have ended


@dataclass
class _Memory:
    """Memory behind tensors of the device, or pinned memory of the host.

    Attributes:
        num_bytes: bytes of the card that it takes; 0 for the host's.
        num_users: tensors that refer to it.
        written: stream and number of the last operation that wrote it.
        read: number of the last operation of each stream that read it.
    """

    num_bytes: int
    num_users: int = 0
    written: tuple[int, int] = (0, 0)
    read: Clock = field(default_factory=dict)


@dataclass
class _Copy:
    """A copy to pinned memory that has not arrived. `stream`, `number`: its operation."""

    target: Tensor
    source: Tensor
    stream: int
    number: int


class _State:
    """Copies that the imitated accelerator has not made yet, its streams and memory, and the number of waits for it."""

    def __init__(self) -> None:
        self._under_way: list[_Copy] = []
        self._changing = threading.RLock()  # threads of channels, too, use what the main loop uses
        self.num_waits, self.forbids = 0, False
        self.device: torch.device | None = None
        self.num_cards = 1
        self.known_to_host: Clock = {}
        self.streams: list[FarStream] = []
        self.stream = FarStream(self)
        self.memory: dict[int, _Memory] = {}
        self.total_bytes, self.other_bytes = 1 << 40, 0
        self.used_bytes = self.peak_bytes = 0

    def wait(self, name: str) -> None:
        if self.forbids:
            raise WaitedError(f"{name} waits for the accelerator")
        self.num_waits += 1
        self.pass_by(self.stream.so_far())

    def begin_copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy on the current stream. `source`: what the device's memory holds now."""
        with self._changing:
            self._under_way.append(_Copy(target, source, self.stream.number, self.stream.begin()))

    @torch.inference_mode()
    def pass_by(self, clock: Clock) -> None:
        """Let the host know that the operations of `clock` have ended, so that their copies have arrived."""
        with self._changing:
            _merge(self.known_to_host, clock)
            for copy in self._under_way:
                if copy.number <= clock.get(copy.stream, 0):
                    copy.target.copy_(copy.source)
            self._under_way = [copy for copy in self._under_way if copy.number > clock.get(copy.stream, 0)]

    def arrived(self, source: Tensor) -> Tensor:
        """What pinned memory holds once the copies to it have been made that the device makes before it reads there."""
        found = source.clone()
        with self._changing:
            for copy in self._under_way:
                if copy.target.data_ptr() == source.data_ptr() and copy.target.shape == source.shape:
                    found.copy_(copy.source)
        return found

    @property
    def card(self) -> torch.device:
        """The device of all tensors there."""
        return self.device or DEVICE

    def require_device(self, what: str) -> None:
        assert self.device is not None, f"{what} before torch.cuda.set_device: it would be on another device"

    def hold(self, tensor: Tensor, near: Tensor, *, is_pinned: bool = False) -> bool:
        """Count the memory of a new tensor, until it is gone. Returns whether the memory is new."""
        storage = near.untyped_storage()
        key = storage.data_ptr()
        if not storage.nbytes():
            return False
        with self._changing:
            is_new = key not in self.memory
            if is_new:
                self.require_device("pinned memory" if is_pinned else "a tensor")
                num_bytes = 0 if is_pinned else storage.nbytes()
                if self.used_bytes + self.other_bytes + num_bytes > self.total_bytes:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
                self.memory[key] = _Memory(num_bytes)
                self.used_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self.memory[key].num_users += 1
        weakref.finalize(tensor, self.release, key).atexit = False
        return is_new

    def release(self, key: int) -> None:
        with self._changing:
            memory = self.memory[key]
            memory.num_users -= 1
            if not memory.num_users:
                self.used_bytes -= memory.num_bytes
                del self.memory[key]

    def use(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Note an operation of the current stream, and fail where another stream may be at the same memory."""
        with self._changing:
            self._use(name, reads, writes)

    def _use(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        stream, number = self.stream.number, self.stream.begin()
        known = self.stream.so_far()
        _merge(known, self.known_to_host)

        def check(other: int, number: int) -> None:
            if other != stream and known.get(other, 0) < number:
                raise RaceError(f"{name} of stream {stream} does not wait for stream {other}, which uses its memory")

        for tensor in reads:
            if memory := self.memory.get(_address(tensor)):
                check(*memory.written)
                memory.read[stream] = number
        for tensor in writes:
            if memory := self.memory.get(_address(tensor)):
                check(*memory.written)
                for each in memory.read.items():
                    check(*each)
                memory.written, memory.read = (stream, number), {}


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _address(tensor: Tensor) -> int:
    return _near(tensor).untyped_storage().data_ptr()


class FarStream:
    """Implements what is used of `torch.cuda.Stream`."""

    def __init__(self, state: _State | None = None) -> None:
        self._state = state if isinstance(state, _State) else _STATE
        self.number = len(self._state.streams)
        self._state.streams.append(self)
        self._known: Clock = {}
        self._num_begun = 0

    def begin(self) -> int:
        """The number of the next operation."""
        self._num_begun += 1
        return self._num_begun

    def so_far(self) -> Clock:
        """Operations that have ended when those begun here have."""
        return {**self._known, self.number: self._num_begun}

    def wait_event(self, event: FarEvent) -> None:
        _merge(self._known, event.clock)

    def wait_stream(self, stream: FarStream) -> None:
        _merge(self._known, stream.so_far())

    def synchronize(self) -> None:
        _STATE.wait("a stream")
        _STATE.pass_by(self.so_far())


class FarEvent:
    """Implements what is used of `torch.cuda.Event`."""

    def __init__(self) -> None:
        self._num_queries = 0
        self.clock: Clock = {}

    def record(self, stream: FarStream | None = None) -> None:
        _STATE.require_device("an event")
        self.clock = (stream or _STATE.stream).so_far()

    def query(self) -> bool:
        self._num_queries += 1
        if self._num_queries < 2:
            return False
        _STATE.pass_by(self.clock)
        return True

    def synchronize(self) -> None:
        _STATE.pass_by(self.clock)


_STATE = _State()


class FarTensor(Tensor):
    """A tensor on the imitated accelerator. `near`: its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        made = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=_STATE.card,
        )  # fmt: skip
        made.near = near
        if _STATE.hold(made, near):
            _STATE.use("an allocation", [], [made])
        return made

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is released when nothing refers to it."""

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


def _tensors_in(value: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors of nested tuples, lists and dictionaries. torch's own trees take ten times as long."""
    found = [] if found is None else found
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for each in value:
            _tensors_in(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _tensors_in(each, found)
    return found


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Nested tuples, lists and dictionaries with another tensor in place of each one."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    if not isinstance(value, tuple | list):
        return value
    items = [_mapped(function, each) for each in value]
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    tensors = _tensors_in(kwargs, _tensors_in(args))
    of_far = any(isinstance(tensor, FarTensor) for tensor in tensors)
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__" and of_far and owner in _PROPERTIES:
        return _PROPERTIES[owner]()
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
    if name == "scaled_dot_product_attention" and to_far and torch.backends.cuda.cudnn_sdp_enabled():
        raise AssertionError("torch may choose cuDNN for masked attention, which builds a plan for each shape")
    found = func(*_mapped(_near, args), **_mapped(_near, kwargs)) if of_far else func(*args, **kwargs)
    if of_far:
        _note_use(name, tensors, _written(name, args, kwargs), found)
    if to_far:
        return _mapped(_far, found)
    if is_pinned or (isinstance(found, Tensor) and _is_pinned_view(found, tensors)):
        _hold_pinned(found)
    return found


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that a function of this name writes to."""
    is_in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    first = args[0] if args else kwargs.get("tensor")
    return [each for each in (first if is_in_place else None, kwargs.get("out")) if isinstance(each, Tensor)]


def _note_use(name: str, tensors: list[Tensor], writes: list[Tensor], found: Any) -> None:
    """Note what an operation reads and writes. Views and properties of tensors are none."""
    made = _tensors_in(found)
    addresses = {_address(tensor) for tensor in tensors}
    is_view = bool(made) and all(_address(each) in addresses for each in made)
    if writes or (made and not is_view) or name in _WAITS:
        _STATE.use(name, [each for each in tensors if not any(each is written for written in writes)], writes)


def _hold_pinned(tensor: Tensor) -> Tensor:
    tensor.is_pinned_here = True
    _STATE.hold(tensor, tensor, is_pinned=True)
    return tensor


def _is_pinned_view(found: Tensor, tensors: list[Tensor]) -> bool:
    return any(getattr(each, "is_pinned_here", False) and _address(each) == _address(found) for each in tensors)


def _check(name: str, func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Fail where torch would, and count what waits."""
    if name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    if any(not isinstance(tensor, FarTensor) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    by_mask = name in {"__getitem__", "__setitem__"} and any(
        isinstance(each, FarTensor) and each.near.dtype == torch.bool for each in _tensors_in(args[1])
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
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*_mapped(_near, args), **_mapped(_near, kwargs))
    for other in args:
        if isinstance(other, FarTensor):
            device = _STATE.card
    near = _near(tensor) if dtype is None else torch.Tensor.to(_near(tensor), dtype)
    is_far = isinstance(tensor, FarTensor)
    if device is None or _is_far(device) == is_far:
        return FarTensor(near) if is_far and near is not tensor.near else (tensor if is_far else near)
    if not (non_blocking and getattr(tensor, "is_pinned_here", False)):
        _STATE.wait("a copy between pageable memory and the device")
    _STATE.use("to", [tensor], [])
    return FarTensor(near.clone()) if _is_far(device) else near.clone()


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    from_far, to_far = isinstance(source, FarTensor), isinstance(target, FarTensor)
    if from_far == to_far:
        if from_far:
            _STATE.use("copy_", [source], [target])
        _near(target).copy_(_near(source))
        return target
    host = target if from_far else source
    if not (non_blocking and getattr(host, "is_pinned_here", False)):
        _STATE.wait("a copy between pageable memory and the device")
        _near(target).copy_(_near(source))
        return target
    _STATE.use("copy_", [source], [target])
    if from_far:
        assert target.is_contiguous(), "torch copies to host memory with gaps before the data have arrived"
        target.fill_(POISON)
        _STATE.begin_copy(target, source.near.clone())
    else:
        target.near.copy_(_STATE.arrived(source))
    return target


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    return _hold_pinned(tensor.clone())


def _to_cpu(tensor: Tensor) -> Tensor:
    return _to(tensor, "cpu")


_SPECIAL = {
    "_has_compatible_shallow_copy_type": lambda *_: False,  # so that modules make new parameters when they move
    "pin_memory": _pin,
    "to": _to,
    "cpu": _to_cpu,
    "copy_": _copy,
}


def _begin(num_cards: int) -> None:
    global _STATE  # noqa: PLW0603 - tensors of the test before count in their own state
    _STATE = _State()
    _STATE.num_cards = num_cards


def _set_device(device: torch.device | int) -> None:
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    assert named.index is not None, "a rank names its card"
    assert 0 <= named.index < _STATE.num_cards, f"{named} of {_STATE.num_cards} cards"
    assert _STATE.device in {None, named}, f"tensors are on {_STATE.device}, and later ones would be on {named}"
    _STATE.device = named


def _properties_of(device: torch.device | int) -> SimpleNamespace:
    index = device if isinstance(device, int) else torch.device(device).index
    return SimpleNamespace(uuid=f"imitated-{index}")


@contextmanager
def _use_stream(stream: FarStream) -> Iterator[None]:
    before, _STATE.stream = _STATE.stream, stream
    try:
        yield
    finally:
        _STATE.stream = before


def _reset_peak(_device: object = None) -> None:
    if not _STATE.streams[0].so_far()[0]:
        raise RuntimeError("Invalid device argument: did you call init?")  # nothing is there yet
    _STATE.peak_bytes = _STATE.used_bytes


def set_card(total_bytes: int, other_bytes: int = 0) -> None:
    """Give the card so much memory, of which so much is not torch's."""
    _STATE.total_bytes, _STATE.other_bytes = total_bytes, other_bytes


def _launch(kernel: Any, grid: Any, args: Any, options: Any) -> None:
    """Launch a kernel in Triton's interpreter on the numbers of its tensors."""
    with np.errstate(all="ignore"):  # a GPU computes infinity and NaN in rows that are masked, without a warning
        launch_now(kernel, grid, tuple(_near(each) for each in args), options)


class _Caught(threading.Thread):
    """A thread whose functions of torch are caught, too: a mode of them holds in one thread alone."""

    def run(self) -> None:
        with _Everywhere():
            super().run()


@contextmanager
def imitated(monkeypatch: pytest.MonkeyPatch, num_cards: int = 1) -> Iterator[None]:
    """Let torch find so many accelerators, of which this process uses one."""
    _begin(num_cards)
    monkeypatch.setattr(threading, "Thread", _Caught)
    stands_in = {
        "is_available": lambda: True,
        "device_count": lambda: num_cards,
        "current_device": lambda: _STATE.card.index,
        "get_device_properties": _properties_of,
        "set_device": _set_device,
        "get_device_capability": lambda _device=None: (0, 0),  # no kernel of Triton runs there
        "device": nullcontext,
        "Event": FarEvent,
        "Stream": lambda _device=None: FarStream(),
        "stream": _use_stream,
        "current_stream": lambda _device=None: _STATE.stream,
        "mem_get_info": lambda _device=None: (
            _STATE.total_bytes - _STATE.other_bytes - _STATE.used_bytes,
            _STATE.total_bytes,
        ),
        "memory_allocated": lambda _device=None: _STATE.used_bytes,
        "memory_reserved": lambda _device=None: _STATE.used_bytes,
        "max_memory_reserved": lambda _device=None: _STATE.peak_bytes,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": lambda: None,
    }
    for name, function in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, function)
    make_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda _device=None: make_generator())
    # It reserves memory ahead of the weights, for speed alone, and takes every card for larger than 1.2 GiB.
    monkeypatch.setattr("transformers.modeling_utils.caching_allocator_warmup", lambda *_: None)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a mode of torch's functions holds in one thread alone
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    if find_spec("triton") is not None:
        triton_interpreter.correct()
    before = replace_launcher(_launch)
    try:
        with _Everywhere():
            yield
    finally:
        replace_launcher(before)
        torch.backends.cuda.enable_cudnn_sdp(enabled=True)


@contextmanager
def forbid_waits() -> Iterator[None]:
    """Let what waits for the imitated accelerator fail."""
    _STATE.forbids = True
    try:
        yield
    finally:
        _STATE.forbids = False


def use(name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
    """Note an operation of the current stream, or of one that it waits for at once."""
    _STATE.use(name, reads, writes)


def use_on(stream: FarStream, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
    """Note an operation of another stream, which waits for the current one."""
    stream.wait_stream(_STATE.stream)
    with _use_stream(stream):
        _STATE.use(name, reads, writes)


def pass_by(clock: Clock) -> None:
    """Let the host know that operations have ended."""
    _STATE.pass_by(clock)


def num_waits() -> int:
    """How often the imitated accelerator was waited for."""
    return _STATE.num_waits


def current_device() -> torch.device | None:
    """The device that `torch.cuda.set_device` has named."""
    return _STATE.device
