"""Canonical decoder layers whose front, up to the gate, is one call of a kernel.

The kernel calls those of the layer's modules in their order, so its result is the same bits. A layer gets it only if it
gives the bits of its own forward on a step of random rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from moestro.model.attention import ATTENTION_FORM, OWN_ATTENTION, STEP_ARGUMENT, AttentionForm
from moestro.model.experts.routed import Routing, routed_experts
from moestro.model.kernels.library import KernelLibrary, KernelPacking
from moestro.model.kernels.matching import random_rows
from moestro.model.kernels.packing import PackedLinear
from moestro.model.kernels.paged import CHECK_BLOCK_SIZE, KernelAttention, make_check_units
from moestro.model.kernels.rows import NORM_EPSILON
from moestro.model.pools import KVPools
from moestro.model.staged.layer_stages import LAYER_FRONT, LayerFront, direct_plans
from moestro.model.step import PagedStep

_ANGLES = "position_embeddings"


class _Product(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class _Norm(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    ]


class _Front(ctypes.Structure):
    """`LayerFront` of `source/layer.cpp`."""

    _fields_ = [
        *((name, _Norm) for name in ("before", "query_norm", "key_norm", "between")),
        *((name, _Product) for name in ("query", "key", "value", "output")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("hidden", "num_heads", "num_kv_heads", "head_size", "window")),
        ("scaling", ctypes.c_float),
    ]


class _StepUnits(ctypes.Structure):
    """`StepUnits` of `source/layer.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tables", "rows", "lengths", "write_slots")),
        *((name, ctypes.c_int64) for name in ("num_units", "table_width", "num_tokens", "block_size")),
    ]


class KernelFront:
    """The front of one layer; implements `layer_stages.LayerFront`.

    Args:
        layer: The layer, whose modules are exchanged.
        form: Form of its attention.
        library: The kernels.

    Raises:
        AttributeError: The layer has other parts.
        ValueError: A part has no kernel, or another size.
    """

    def __init__(self, layer: Any, form: AttentionForm, library: KernelLibrary) -> None:
        attention = layer.self_attn
        own = attention.__dict__.get(OWN_ATTENTION)
        if not isinstance(own, KernelAttention) or form.key_size != form.value_size:
            raise ValueError("its attention has no kernel of one head size")
        hidden, size, scaling = layer.input_layernorm.weight.numel(), form.key_size, form.scoring.scaling
        widths = (form.num_heads * size, form.num_kv_heads * size)
        self._place = attention.layer_idx
        self._run, self._dtype = library.function["layer_front"], torch.bfloat16
        self._front = _Front(
            _norm(layer.input_layernorm, hidden),
            _optional_norm(attention, "q_norm", widths[0]),
            _optional_norm(attention, "k_norm", widths[1]),
            _norm(layer.post_attention_layernorm, hidden),
            _product(attention.q_proj, widths[0], hidden),
            _product(attention.k_proj, widths[1], hidden),
            _product(attention.v_proj, widths[1], hidden),
            _product(attention.o_proj, hidden, widths[0]),
            own.sinks_address,
            hidden,
            form.num_heads,
            form.num_kv_heads,
            size,
            form.scoring.window or 0,
            size**-0.5 if scaling is None else scaling,
        )
        self._address, self._size = ctypes.addressof(self._front), size
        self._heads = torch.empty(0, form.num_kv_heads, size, dtype=torch.bfloat16)

    def __call__(self, hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Implement `LayerFront`."""
        step, angles = arguments.get(STEP_ARGUMENT), arguments.get(_ANGLES)
        if not isinstance(step, PagedStep) or not isinstance(angles, tuple) or hidden.dtype is not self._dtype:
            return None
        cos, sin = angles
        wanted = (1, len(hidden), self._size)
        if cos.dtype is not self._dtype or cos.shape != wanted or sin.shape != wanted:
            return None
        keys, values = step.pools.find(self._place) or step.pools.of_layer(self._place, self._heads, self._heads)
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        stream, inputs = torch.empty_like(hidden), torch.empty_like(hidden)
        self._run(
            self._address,
            _units_of(step),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            hidden.data_ptr(),
            stream.data_ptr(),
            inputs.data_ptr(),
        )
        return stream, inputs


def _units_of(step: PagedStep) -> int:
    """Address of the step's `_StepUnits`, which the step keeps."""
    units = step.kernel_units
    if units is None:
        layout = step.layout
        units = step.kernel_units = _StepUnits(
            *layout.addresses,
            step.write_slots.data_ptr(),
            len(layout.lengths),
            layout.tables.shape[1],
            len(step.positions),
            step.pools.block_size,
        )
    return ctypes.addressof(units)


def _norm(module: nn.Module, width: int) -> _Norm:
    if NORM_EPSILON not in module.__dict__:
        raise ValueError("a norm has no kernel")
    weight = cast(Tensor, module.weight)
    if width % weight.numel():
        raise ValueError("a norm has another size")
    return _Norm(weight.data_ptr(), weight.numel(), module.__dict__[NORM_EPSILON])


def _optional_norm(attention: nn.Module, name: str, width: int) -> _Norm:
    module = getattr(attention, name, None)
    return _Norm(None, 0, 0.0) if module is None else _norm(module, width)


def _product(module: Any, num_out: int, num_in: int) -> _Product:
    if not isinstance(module, PackedLinear) or not isinstance(module.packing, KernelPacking):
        raise ValueError("a product has no kernel")
    if module.weight.shape != (num_out, num_in):
        raise ValueError("a product has another size")
    return _Product(module.packed_address, None if module.bias is None else module.bias.data_ptr())


def plan_layer(layer: Any, routing: Routing | None, library: KernelLibrary) -> bool:
    """Give a layer the one-call front, in its own forward and in stages. Returns whether it computes the same bits.

    Args:
        layer: A decoder layer, whose modules but its experts are exchanged.
        routing: State of the network's experts; None for a dense network.
        library: The kernels.
    """
    form = getattr(layer, "self_attn", layer).__dict__.get(ATTENTION_FORM)
    if form is None:
        return False
    with suppress(AttributeError, ValueError, TypeError, RuntimeError, KeyError, IndexError):
        front, original = KernelFront(layer, form, library), layer.forward
        forward = make_forward(layer, front, original)
        wanted = try_layer(layer, form, original, routing)
        if _is_equal(wanted, try_layer(layer, form, forward, routing)):
            layer.__dict__["forward"] = forward
            layer.__dict__[LAYER_FRONT] = front
            return True
    return False


def make_forward(layer: Any, front: LayerFront, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the forward of a layer around its front."""
    direct, mlp = next(iter(direct_plans(layer)), None), layer.mlp

    def forward(hidden_states: Tensor, *args: Any, **arguments: Any) -> Tensor:
        if args or len(hidden_states) != 1:
            return original(hidden_states, *args, **arguments)
        fronted = front(hidden_states[0], arguments)
        if fronted is None:
            return original(hidden_states, **arguments)
        stream, inputs = fronted
        if direct is None:
            return cast(Tensor, (stream + mlp(inputs[None])[0])[None])
        attended = direct.choose(stream, inputs)
        assert attended.topk_ids is not None
        assert attended.topk_weights is not None
        chosen = (mlp.experts, inputs, attended.topk_ids, attended.topk_weights)
        if direct.is_routed_alone:
            return routed_experts(*chosen, stream)[None]
        return direct.complete(attended, routed_experts(*chosen), arguments)[None]

    return forward


def try_layer(
    layer: Any,
    form: AttentionForm,
    forward: Callable[..., Tensor],
    routing: Routing | None,
    angle_width: int | None = None,
) -> tuple[Tensor, KVPools]:
    """Run a layer on random rows without its experts.

    Args:
        layer, form, routing: As for `plan_layer`.
        forward: The layer's forward, or one that may replace it.
        angle_width: Cosines of a token; None means those of a whole head, whose halves are equal.

    Returns:
        Its output, and K and V.
    """
    weight = layer.input_layernorm.weight
    device, dtype = weight.device, weight.dtype
    units = make_check_units(form.scoring.window)
    num_tokens = int(units.num_tokens.sum())
    pools = KVPools(int(units.block_tables.max()) + 1, CHECK_BLOCK_SIZE)
    step = PagedStep(units, pools, device)
    hidden = random_rows(1, num_tokens, weight.numel()).to(device, dtype)
    angles = random_rows(1, num_tokens, form.key_size // 2, seed=1).to(torch.float32).repeat(1, 1, 2)
    angles = angles[..., :angle_width]
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    before = None if routing is None else routing.stand_in
    if routing is not None:
        routing.stand_in = lambda _module, rows, _ids, weights: rows * weights[:, :1]
    try:
        return forward(hidden, **{_ANGLES: tables, STEP_ARGUMENT: step, "attention_mask": None}), pools
    finally:
        if routing is not None:
            routing.stand_in = before


def _is_equal(one: tuple[Tensor, KVPools], other: tuple[Tensor, KVPools]) -> bool:
    """Whether two outputs are tensors of the same bits, and so K and V."""
    if not isinstance(one[0], Tensor) or not torch.equal(one[0], other[0]):
        return False
    pairs = zip(one[1].blocks(), other[1].blocks(), strict=True)
    return one[1].layers == other[1].layers and all(torch.equal(mine, theirs) for mine, theirs in pairs)
