"""Canonical decoder layers whose front, up to the gate, is seven launches. The sums are those of the modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moestro.model.attention import STEP_ARGUMENT, AttentionForm
from moestro.model.cuda.functions import CudaKernels, HeadNorms, Norm
from moestro.model.cuda.units import Walk
from moestro.model.float8 import Float8Linear, Float8Weight
from moestro.model.kernels.rows import NORM_EPSILON
from moestro.model.step import PagedStep

_ANGLES = "position_embeddings"


class CudaFront:
    """The front of one layer; implements `layer_stages.LayerFront`.

    The layer's query, key and value weights become views of one tensor.

    Args:
        layer: The layer, whose modules are exchanged.
        form: Form of its attention.
        kernels: The kernels.
        angle_width: Cosines of a token: as many as a head has numbers, or half of them.

    Raises:
        AttributeError: The layer has other parts.
        ValueError: A part has no kernel, or another size.
    """

    def __init__(self, layer: Any, form: AttentionForm, kernels: CudaKernels, angle_width: int) -> None:
        attention = layer.self_attn
        size = form.key_size
        if form.value_size != size or size % 2 or form.scoring.values_in_keys:
            raise ValueError("its heads of queries, keys and values have several sizes")
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        widths = (form.num_heads * size, form.num_kv_heads * size, form.num_kv_heads * size)
        hidden = layer.input_layernorm.weight.numel()
        for module, width in zip(projections, widths, strict=True):
            if module.weight.shape != (width, hidden):
                raise ValueError("a projection has another size")
        if attention.o_proj.weight.shape != (hidden, widths[0]):
            raise ValueError("the output projection has another size")
        self._kernels, self._form, self._place = kernels, form, attention.layer_idx
        self._angle_width = angle_width
        self._before = _norm_of(layer.input_layernorm, hidden)
        self._between = _norm_of(layer.post_attention_layernorm, hidden)
        self._norms = _head_norms(attention, size)
        self._bias = _join_biases(projections)
        output = attention.o_proj
        self._output = output.stored if isinstance(output, Float8Linear) else output.weight
        self._output_bias, self._qkv = output.bias, _join_weights(projections)
        self._heads = torch.empty(0, form.num_kv_heads, size, dtype=kernels.dtype, device=kernels.device)
        kernels.add_walk(Walk.of(form))

    def __call__(self, hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Implement `LayerFront`."""
        step, angles = arguments.get(STEP_ARGUMENT), arguments.get(_ANGLES)
        if not isinstance(step, PagedStep) or not isinstance(angles, tuple) or hidden.dtype is not self._kernels.dtype:
            return None
        cos, sin = angles
        if cos.dtype is not hidden.dtype or not cos.shape == sin.shape == (1, len(hidden), self._angle_width):
            return None
        kernels, form, hidden = self._kernels, self._form, hidden.contiguous()
        pools = step.pools.find(self._place) or step.pools.of_layer(self._place, self._heads, self._heads)
        normed = kernels.rms_norm(hidden, self._before)
        qkv = kernels.product(normed, self._qkv, self._bias)
        angles = cos[0].contiguous(), sin[0].contiguous()
        query = kernels.heads(qkv, angles, self._norms, (*pools, step.write_slots), form)
        mixed = kernels.attend(query, pools, kernels.units_of(step), form, step.pools.block_size)
        output = kernels.product(mixed.view(len(hidden), -1), self._output, self._output_bias)
        return kernels.add_norm(hidden, output, self._between)


def _norm_of(module: nn.Module, size: int) -> Norm:
    """An exchanged norm."""
    if NORM_EPSILON not in module.__dict__:
        raise ValueError("a norm has no kernel")
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.shape != (size,):
        raise ValueError("a norm has another size")
    return Norm(weight.data, module.__dict__[NORM_EPSILON])


def _head_norms(attention: nn.Module, size: int) -> HeadNorms | None:
    """The norms of query and key heads, if there are such norms."""
    modules = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if modules == [None, None]:
        return None
    query, key = (_norm_of(module, size) for module in modules if module is not None)
    if query.epsilon != key.epsilon:
        raise ValueError("the norms of heads differ")
    return HeadNorms(query.weight, key.weight, query.epsilon)


def _join_weights(projections: tuple[Any, ...]) -> Tensor | Float8Weight:
    """Join weights [out, in] in one, of which the modules keep views."""
    if not any(isinstance(module, Float8Linear) for module in projections):
        return _join([module.weight for module in projections])
    if not all(isinstance(module, Float8Linear) for module in projections):
        raise ValueError("only some projections are in float8")
    block = projections[0].block
    if any(module.block != block or len(module.weight) % block.height for module in projections):
        raise ValueError("a block of scales would have rows of two projections")
    numbers, scales = (
        _join([getattr(module, name) for module in projections]) for name in ("weight", "weight_scale_inv")
    )
    return Float8Weight(numbers, scales, block)


def _join(parameters: list[Tensor]) -> Tensor:
    """Join tensors in one, of which the parameters become views."""
    joined = torch.cat([parameter.data for parameter in parameters])
    begin = 0
    for parameter in parameters:
        end = begin + len(parameter)
        parameter.data = joined[begin:end]
        begin = end
    return joined


def _join_biases(projections: tuple[Any, ...]) -> Tensor | None:
    biases = [module.bias for module in projections]
    if all(bias is None for bias in biases):
        return None
    if any(bias is None for bias in biases):
        raise ValueError("only some projections have a bias")
    return torch.cat([bias.data for bias in biases])
