"""Modules that compute row by row, on own kernels: RMS norms, rotary positions, the products and sigmoids of gates.

A module stays the object that it was, so that all holders of a reference to it use the kernel too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moestro.model.kernels.library import HEAD_MULTIPLE, ROW_MULTIPLE, KernelLibrary
from moestro.model.kernels.matching import MISFITS, NUM_CHECK_ROWS, is_close, is_rowwise, random_rows

_ROTARY = "apply_rotary_pos_emb"
_COMPLEX_ROTARY = "apply_rotary_emb"
_ORIGINAL = "moestro_original"
NORM_EPSILON = "moestro_epsilon"  # attribute of an exchanged norm


def exchange_norm(module: nn.Module, library: KernelLibrary) -> bool:
    """Give an RMS norm the kernel. Returns whether it computes what the kernel does."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or weight.dtype is not torch.bfloat16 or not isinstance(epsilon, float):
        return False
    if len(weight) % ROW_MULTIPLE:
        return False
    original, weight = module.forward, weight.data

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype is not torch.bfloat16:
            return cast(Tensor, original(hidden_states))
        return library.rms_norm(hidden_states, weight, epsilon)

    rows = random_rows(NUM_CHECK_ROWS, len(weight))
    try:
        is_exchanged = is_close(forward(rows), original(rows))
    except MISFITS:
        return False
    if is_exchanged:
        module.__dict__["forward"] = forward
        module.__dict__[NORM_EPSILON] = epsilon
    return is_exchanged


def exchange_rotary(attention: nn.Module, head_size: int, library: KernelLibrary) -> bool:
    """Give the rotary function of an attention module's family the kernel.

    The function belongs to the module's source file, which all networks of the family share. The kernel therefore
    returns the same bits, and the original still serves what the kernel does not know.

    Args:
        attention: An attention module.
        head_size: Size of its heads, for the comparison.

    Returns:
        Whether the function, if the family has one, gives the same bits as the kernel.
    """
    home = sys.modules[type(attention).__module__]
    original: Any = getattr(home, _ROTARY, None)
    if original is None or hasattr(original, _ORIGINAL) or head_size % HEAD_MULTIPLE:
        return hasattr(original, _ORIGINAL)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or not (_can_rotate(q, cos, sin) and _can_rotate(k, cos, sin)):
            return cast(tuple[Tensor, Tensor], original(q, k, cos, sin, *args, **kwargs))
        return library.rotate(q, cos, sin), library.rotate(k, cos, sin)

    q, k = (random_rows(1, heads, NUM_CHECK_ROWS, head_size, seed=heads) for heads in (4, 2))
    angles = random_rows(1, NUM_CHECK_ROWS, head_size // 2).to(torch.float32).repeat(1, 1, 2)
    tables = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    try:
        is_equal = all(map(torch.equal, rotate(q, k, *tables), original(q, k, *tables)))
    except MISFITS:
        return False
    if is_equal:
        setattr(rotate, _ORIGINAL, original)
        setattr(home, _ROTARY, rotate)
    return is_equal


def is_rotation_rowwise(attention: nn.Module) -> bool:
    """Whether a rotation of complex numbers, if an attention module's family has one, gives tokens the same bits alone.

    torch multiplies complex numbers at the end of a vector by another formula than the rest. Rounding to bfloat16 hides
    nearly all of these differences, so that they are sought in float32.
    """
    rotate: Any = getattr(sys.modules[type(attention).__module__], _COMPLEX_ROTARY, None)
    size = getattr(attention, "qk_rope_head_dim", None)
    if rotate is None or size is None:
        return True
    heads = random_rows(1, 3, NUM_CHECK_ROWS, size).to(torch.float32)
    angles = random_rows(1, NUM_CHECK_ROWS, size // 2).to(torch.float32)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turn(first: int, end: int) -> Tensor:
        return cast(Tensor, rotate(heads[:, :, first:end], heads[:, :1, first:end], turns[:, first:end])[0])

    try:
        whole = turn(0, NUM_CHECK_ROWS)
        return all(torch.equal(turn(at, at + 1), whole[:, :, at : at + 1]) for at in range(NUM_CHECK_ROWS))
    except MISFITS:
        return True  # real numbers, whose products are rounded alike everywhere


def _can_rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        heads.dim() == 4
        and heads.shape[0] == 1
        and heads.dtype is cos.dtype is sin.dtype is torch.bfloat16
        and heads.device.type == "cpu"
        and heads.stride(3) == 1
        and cos.shape == sin.shape == (1, heads.shape[2], heads.shape[3])
        and cos.is_contiguous()
        and sin.is_contiguous()
        and heads.shape[3] % HEAD_MULTIPLE == 0
    )


_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)  # `functional.sigmoid` calls the second
_CONVERSIONS = (Tensor.float, Tensor.to, Tensor.type)


class SigmoidLogits(Tensor):
    """Logits of a gate whose sigmoid in float32 is computed by the kernel.

    torch computes the end of a vector, and of the part of each of its threads, by another formula than the rest, so
    that the number of rows changes bits. All results but those of conversions are plain tensors.
    """

    library: KernelLibrary

    @classmethod
    def of(cls, logits: Tensor, library: KernelLibrary) -> Tensor:
        """Mark `logits`."""
        marked = logits.as_subclass(cls)
        marked.library = library
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement torch's protocol."""
        logits = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if not isinstance(logits, cls):
                return func(*args, **(kwargs or {}))
            if func in _SIGMOIDS and logits.dtype is torch.float32 and not kwargs:
                return logits.library.sigmoid(logits.as_subclass(Tensor))
            result = func(logits.as_subclass(Tensor), *args[1:], **(kwargs or {}))
            return cls.of(result, logits.library) if func in _CONVERSIONS else result


class _SigmoidWatch(TorchFunctionMode):
    """Notes whether a sigmoid is computed in its block."""

    is_seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement torch's protocol."""
        self.is_seen |= func in _SIGMOIDS
        return func(*args, **(kwargs or {}))


class RowwiseWeight(Tensor):
    """A weight of a gate, whose product with rows does not depend on their number.

    The gate's forward stays transformers'. Only `functional.linear` with this tensor is computed by the kernel; it is
    a tensor like others for all other functions.

    Attributes:
        library: the kernels; None means that torch computes.
        packed: the weight as the kernel reads it; None where it cannot.
        has_sigmoid: whether the gate computes a sigmoid of its logits.
    """

    library: KernelLibrary | None = None
    packed: Tensor | None = None
    has_sigmoid = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement torch's protocol."""
        if func is functional.linear and not kwargs and isinstance(args[1], cls):
            with torch._C.DisableTorchFunctionSubclass():
                product = args[1]._multiply(args[0], args[2] if len(args) > 2 else None)
            if product is not None:
                return product
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls) and isinstance(args[0], cls):
            result.library, result.has_sigmoid = args[0].library, args[0].has_sigmoid
        return result

    def _multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        """Multiply, where a kernel knows the dtypes."""
        library, plain = self.library, (torch.float32, torch.bfloat16)
        if library is None or rows.dtype is not self.dtype or self.dtype not in plain or rows.device.type != "cpu":
            return None
        if self.packed is not None:
            product = library.linear(rows, self.packed, bias)
        else:
            wide = None if bias is None else bias.to(torch.float32).contiguous()
            weight = self.as_subclass(Tensor).to(torch.float32).contiguous()
            product = library.linear_float(rows.to(torch.float32), weight, wide).to(rows.dtype)
        return SigmoidLogits.of(product, library) if self.has_sigmoid else product


def exchange_gate(module: nn.Module, pack: Callable[[Tensor], Tensor | None], library: KernelLibrary) -> bool:
    """Make a gate's bare weight a `RowwiseWeight`, if its product agrees with torch's.

    Args:
        module: The gate, with a `weight` [experts, hidden size].
        pack: Function that packs a weight for the kernels; None where it cannot.

    Returns:
        Whether the batch no longer changes the gate's bits. But for a sigmoid, its own functions stay torch's.
    """
    weight = module._parameters["weight"]
    assert weight is not None
    rowwise = weight.data.as_subclass(RowwiseWeight)
    rowwise.library, rowwise.packed = library, pack(weight.data)
    rows = random_rows(NUM_CHECK_ROWS, weight.shape[1]).to(weight.dtype)
    if not is_close(functional.linear(rows, rowwise), functional.linear(rows, weight.data)):
        return False
    module._parameters["weight"] = cast(Any, rowwise)
    # Some gates take their correction from the module around them.
    for correction in ((), (torch.zeros(len(weight)),)):
        try:
            with _SigmoidWatch() as watch:
                module(random_rows(1, weight.shape[1]), *correction)
            rowwise.has_sigmoid = watch.is_seen
            return is_rowwise(lambda rows: module(rows, *correction), weight.shape[1])  # noqa: B023 - called at once
        except MISFITS:
            continue
    return False
