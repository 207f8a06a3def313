"""The kernels as functions of tensors, for one network, and its routed experts on them.

Weights of experts are found by their addresses, so that an expert may move to other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor, nn

from moestro.model.attention import STEP_ARGUMENT, AttentionForm
from moestro.model.cuda.source import attend as attention
from moestro.model.cuda.source import products, rows
from moestro.model.cuda.tiles import (
    MOST_FLOAT8_ROWS,
    MOST_PARTS_ROWS,
    NARROW_ROWS,
    SPLIT,
    StepUnits,
    Tile,
    Walk,
    assemble,
    attention_keys,
    attention_options,
    columns_of,
    dense_tile,
    expert_tile,
    launch,
    num_segments,
    power_of_two,
    shared_bytes_of,
)
from moestro.model.kernels.rows import NORM_EPSILON
from moestro.model.step import PagedStep
from moestro.model.tensors import Float8Linear, Float8Weight, ScaleBlock, upload, upload_all

KERNEL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}  # with their names in kernels
_SPACING = 4  # int32 in 16 bytes
_MOST_ROWS = 1 << 17  # rows of a step whose number is kept on the device
_MOST_PROGRAMS = 512  # of an attention, for each group of heads; each takes every so many-th item
_ADD_COLUMNS = 256
_FEW_ARRIVALS = 1 << 14  # units times groups of heads of an attention for which there is room from the start
_HEAD_ROWS = 4  # rows of a program of `heads`


class Product(NamedTuple):
    """A dense product: [rows, out], or with several segments float32[segments, rows, out] that a reader adds."""

    numbers: Tensor
    segments: int


def _stored(weight: Tensor | Float8Weight, inputs: Tensor) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Numbers and scales of a weight, and the launch's arguments on their blocks. `inputs` stand for no scales."""
    if isinstance(weight, Float8Weight):
        return weight.numbers, weight.scales, block_options(weight.block)
    return weight, inputs, block_options(None)


def block_options(block: ScaleBlock | None) -> dict[str, int]:
    """Arguments of a launch on the blocks of its weights. None means that they have no scales."""
    height, width = block or (0, 0)
    return {"HEIGHT": height, "WIDTH": width}


class Norm(NamedTuple):
    """An RMS norm: its weight [size], and what is added to the mean square."""

    weight: Tensor
    epsilon: float


class HeadNorms(NamedTuple):
    """The norms of query and key heads: weights [head size], and what is added to the mean square."""

    query: Tensor
    key: Tensor
    epsilon: float


class CudaKernels:
    """The kernels on one device.

    Args:
        device: The device.
        dtype: Data type of weights, activations, K and V.

    Attributes:
        device, dtype: As above.
        shared_bytes: Shared memory that a program may have.
        walks: Walks of the network's attentions.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.shared_bytes = shared_bytes_of(device)
        self.walks: list[Walk] = []
        # Each number has 16 bytes, because the compiler makes another kernel for addresses that are no multiples.
        self._numbers = torch.arange(_MOST_ROWS + 1, dtype=torch.int32, device=device).repeat_interleave(_SPACING)
        self._present: Tensor | None = None
        self._padded = 0
        self._arrived = [torch.zeros(_FEW_ARRIVALS, dtype=torch.int32, device=device)]

    def add_walk(self, walk: Walk) -> None:
        """Plan this walk in every step from now on."""
        if walk not in self.walks:
            self.walks.append(walk)

    def units_of(self, step: PagedStep) -> StepUnits:
        """The step's units on the device, which the step keeps for all layers."""
        units = step.kernel_units
        if not isinstance(units, StepUnits):
            columns = upload_all(list(columns_of(step, self.walks)), self.device)
            units = step.kernel_units = assemble(self.walks, iter(columns), int(step.length_of.max(initial=0)))
        return units

    def assume_rows(self, num_rows: Tensor | None, padded: int = 0) -> None:
        """Let all kernels that get `padded` rows compute so many of them, int32[1]; None ends that."""
        self._present, self._padded = num_rows, padded

    def count_of(self, tensor: Tensor) -> Tensor:
        """int32[1], rows of `tensor` [rows, ...] to compute."""
        if self._present is not None and len(tensor) == self._padded:
            return self._present
        return self._number(len(tensor))

    def _number(self, number: int) -> Tensor:
        """int32[1], a number on the device."""
        if number > _MOST_ROWS:
            return upload(np.array([number], np.int32), self.device)
        return self._numbers[number * _SPACING : number * _SPACING + 1]

    def linear(self, inputs: Tensor, weight: Tensor | Float8Weight, bias: Tensor | None = None) -> Tensor:
        """Compute `functional.linear`. `inputs`: [..., in]."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        product = self.product(flat, weight, bias, as_segments=False)
        return product.numbers.view(*inputs.shape[:-1], len(weight))

    def product(
        self,
        inputs: Tensor,
        weight: Tensor | Float8Weight,
        bias: Tensor | None = None,
        *,
        as_segments: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Product:
        """Multiply rows [rows, in] with a weight [out, in].

        Args:
            as_segments: Whether the reader can add segments, which few rows give.
            dtype: Type of the product; None means that of the rows.
        """
        (num_rows, num_in), num_out = inputs.shape, len(weight)
        tile_rows = min(num_rows, MOST_FLOAT8_ROWS) if isinstance(weight, Float8Weight) else num_rows
        segments, tile = num_segments(num_out, num_in), dense_tile(tile_rows, inputs.dtype, self.shared_bytes)
        is_whole = not (as_segments and bias is None and segments > 1 and num_rows <= MOST_PARTS_ROWS)
        shape = (num_rows, num_out) if is_whole else (segments, num_rows, num_out)
        out = inputs.new_empty(shape, dtype=dtype or self.dtype if is_whole else torch.float32)
        inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        grid = (-(-num_out // tile.outs), -(-num_rows // tile.tokens), 1 if is_whole else segments)
        numbers, scales, blocks = _stored(weight, inputs)
        launch(
            products.linear, grid, inputs, numbers, inputs if bias is None else bias, out, self.count_of(inputs),
            inputs.stride(0), numbers.stride(0), num_rows * num_out, 0, scales, **blocks,
            OUT=num_out, IN=num_in, SEGMENTS=segments, IS_WHOLE=is_whole, HAS_BIAS=bias is not None, HAS_HEADS=False,
            TOKENS=tile.tokens, OUTS=tile.outs, DEPTH=tile.depth_of(num_in // segments), **tile.launch_options,
        )  # fmt: skip
        return Product(out, 1 if is_whole else segments)

    def linear_heads(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """[1, heads, rows, out], products of each head's rows [1, heads, rows, in] with its weight [heads, out, in]."""
        _, num_heads, num_rows, num_in = inputs.shape
        num_out, tile = weights.shape[1], dense_tile(num_rows, self.dtype, self.shared_bytes)
        inputs = inputs if inputs.stride(3) == 1 else inputs.contiguous()
        out = inputs.new_empty(1, num_heads, num_rows, num_out)
        grid = (-(-num_out // tile.outs), -(-num_rows // tile.tokens), num_heads)
        launch(
            products.linear, grid, inputs, weights, weights, out, self.count_of(inputs[0, 0]), inputs.stride(2),
            weights.stride(1), num_rows * num_out, inputs.stride(1), inputs, **block_options(None),
            OUT=num_out, IN=num_in, SEGMENTS=1, IS_WHOLE=True, HAS_BIAS=False, HAS_HEADS=True,
            TOKENS=tile.tokens, OUTS=tile.outs, DEPTH=tile.depth_of(num_in), **tile.launch_options,
        )  # fmt: skip
        return out

    def rms_norm(self, inputs: Tensor, norm: Norm) -> Tensor:
        """Compute weight * rows / root mean square of each row. `inputs`: [..., size]."""
        flat = inputs.reshape(-1, len(norm.weight)).contiguous()
        out = torch.empty_like(flat)
        self._add_norm(flat, None, norm, (flat, out))
        return out.view(inputs.shape)

    def add_norm(self, stream: Tensor, update: Product, norm: Norm) -> tuple[Tensor, Tensor]:
        """stream + update, and its norm. `stream`: [rows, size]."""
        results = torch.empty_like(stream), torch.empty_like(stream)
        self._add_norm(stream, update, norm, results)
        return results

    def _add_norm(self, stream: Tensor, update: Product | None, norm: Norm, results: tuple[Tensor, Tensor]) -> None:
        size, wide = len(norm.weight), power_of_two(len(norm.weight))
        # Rows that are no tokens, such as heads, all count.
        present = self._number(len(stream)) if update is None else self.count_of(stream)
        launch(
            rows.add_norm, (len(stream),), stream, stream if update is None else update.numbers, norm.weight, *results,
            present, stream.numel(), norm.epsilon, SIZE=size, WIDE=wide, HAS_UPDATE=update is not None,
            SEGMENTS=1 if update is None else update.segments, num_warps=8 if wide >= 2048 else 4,
        )  # fmt: skip

    def heads(
        self, qkv: Product, angles: tuple[Tensor, Tensor], norms: HeadNorms | None,
        places: tuple[Tensor, Tensor, Tensor], form: AttentionForm,
    ) -> Tensor:  # fmt: skip
        """Norm and rotate heads, and store K and V.

        Args:
            qkv: Product of all heads' weights.
            angles: Cosines and sines, each [rows, half of a head or more].
            norms: Norms of query and key heads; None means no norms.
            places: K and V of the layer, and int64[rows], the rows' slots there.
            form: Form of the attention.

        Returns:
            [rows, query heads, head size].
        """
        (cos, sin), size = angles, form.key_size
        num_rows = qkv.numbers.shape[-2]
        query = cos.new_empty(num_rows, form.num_heads, size)
        q_weight, k_weight, epsilon = (cos, cos, 0.0) if norms is None else norms
        grid = (-(-num_rows // _HEAD_ROWS), form.num_heads + 2 * form.num_kv_heads)
        launch(
            rows.heads, grid, qkv.numbers, cos, sin, q_weight, k_weight,
            query, *places, self.count_of(query), num_rows * qkv.numbers.shape[-1], cos.stride(0), epsilon,
            HEADS_Q=form.num_heads, HEADS_KV=form.num_kv_heads, SIZE=size, HALF=size // 2, WIDE=power_of_two(size // 2),
            ROWS=_HEAD_ROWS, HAS_NORM=norms is not None, SEGMENTS=qkv.segments, num_warps=1,
        )  # fmt: skip
        return query

    def attend(
        self, query: Tensor, pools: tuple[Tensor, Tensor], units: StepUnits, form: AttentionForm, block_size: int
    ) -> Tensor:
        """[rows, query heads, V size], attention of a step whose K and V are in the pools.

        Args:
            query: [rows, query heads, K size].
            pools: K and V of the layer, [slots, KV heads, size].
            units: The step's units.
            form: Form of the attention.
            block_size: Tokens of a block.
        """
        walk = Walk.of(form)
        work = units.walks[walk]
        out = query.new_empty(len(query), form.num_heads, form.value_size)
        query = query if query.stride()[1:] == (form.key_size, 1) else query.contiguous()
        groups = form.num_kv_heads * -(-walk.num_shared // walk.heads_of(NARROW_ROWS))
        arrived = self._arrivals(len(units.length_of) * groups)
        call = _AttentionCall(query, pools, units, form, walk, block_size, out, arrived, self.shared_bytes)
        if len(work.narrow):
            call.attend(work.narrow, work.counts[0:1], NARROW_ROWS, may_split=units.may_split)
        if len(work.wide):
            call.attend(work.wide, work.counts[1:2], walk.widest, may_split=False)
        return out

    def _arrivals(self, count: int) -> Tensor:
        """int32[count or more], 0 before and after each kernel that counts in it."""
        if len(self._arrived[-1]) < count:
            # The memory before stays, because graphs may have recorded its address.
            self._arrived.append(torch.zeros(power_of_two(count), dtype=torch.int32, device=self.device))
        return self._arrived[-1]

    def choose(self, logits: Product, gate: GateForm) -> tuple[Tensor, Tensor]:
        """(int64[rows, k], float32[rows, k]), the chosen experts and their weights."""
        num_rows, num_experts = logits.numbers.shape[-2:]
        ids = torch.empty(num_rows, gate.num_chosen, dtype=torch.int64, device=self.device)
        weights = torch.empty(num_rows, gate.num_chosen, dtype=torch.float32, device=self.device)
        bias, correction = (weights if each is None else each for each in (gate.bias, gate.correction))
        launch(
            rows.choose, (num_rows,), logits.numbers, bias, correction, ids, weights, self.count_of(ids),
            num_rows * num_experts, gate.factor,
            EXPERTS=num_experts, BINS=power_of_two(num_experts), CHOSEN=gate.num_chosen,
            WIDE=power_of_two(gate.num_chosen), SEGMENTS=logits.segments, HAS_BIAS=gate.bias is not None,
            IS_SIGMOID=gate.is_sigmoid, HAS_CORRECTION=gate.correction is not None, NORMALIZES=gate.normalizes,
            GROUPS=gate.num_groups, WIDE_GROUPS=power_of_two(gate.num_groups), KEPT_GROUPS=gate.num_kept_groups,
            KIND=KERNEL_DTYPES[gate.dtype], num_warps=1,
        )  # fmt: skip
        return ids, weights


class GateForm(NamedTuple):
    """How a gate chooses; as in `rows.choose`. `dtype`: to which logits and weights are rounded."""

    num_chosen: int
    dtype: torch.dtype
    is_sigmoid: bool
    normalizes: bool
    factor: float = 1.0
    bias: Tensor | None = None
    correction: Tensor | None = None
    num_groups: int = 1
    num_kept_groups: int = 1


class _AttentionCall(NamedTuple):
    """Arguments that the launches of one attention share."""

    query: Tensor
    pools: tuple[Tensor, Tensor]
    units: StepUnits
    form: AttentionForm
    walk: Walk
    block_size: int
    out: Tensor
    arrived: Tensor
    shared_bytes: int

    def attend(self, items: Tensor, num_items: Tensor, num_rows: int, *, may_split: bool) -> None:
        """Launch `attend`. `may_split`: whether items may be splits."""
        form, (keys, values), query = self.form, self.pools, self.query
        taken = self.walk.heads_of(num_rows)
        groups = form.num_kv_heads * -(-self.walk.num_shared // taken)
        size, wide_v = form.key_size, max(power_of_two(form.value_size), 16)
        head = max(1 << (size.bit_length() - 1), 16)
        rest = max(power_of_two(size - head), 16) if size > head else 0
        num_parts = len(items) if may_split else 0
        part_acc = query.new_empty(num_parts, groups, num_rows, form.value_size, dtype=torch.float32)
        part_ml = query.new_empty(num_parts, groups, num_rows, 2, dtype=torch.float32)
        sinks, scaling = form.scoring.sinks, form.scoring.scaling
        launch(
            attention.attend, (min(len(items), _MOST_PROGRAMS), groups), query, keys, values, self.out, part_acc,
            part_ml, self.arrived, self.out if sinks is None else sinks, self.units.tables, self.units.row_of,
            self.units.length_of, items, num_items, query.stride(0), keys.stride(0), values.stride(0),
            size**-0.5 if scaling is None else scaling,
            HEADS=form.num_heads, SHARED=self.walk.num_shared, TAKEN=taken,
            SIZE_K=size, HEAD_K=head, REST_K=rest, SIZE_V=form.value_size, WIDE_V=wide_v,
            BLOCK=self.block_size, QUERIES=self.walk.queries_of(num_rows), ROWS=num_rows,
            TILE=attention_keys(size, query.dtype), SPLIT=SPLIT, WINDOW=self.walk.window or 0,
            HAS_SINK=sinks is not None,
            **attention_options(num_rows, len(query), size, query.dtype, self.shared_bytes),
        )  # fmt: skip


def expert_columns(hidden: int) -> int:
    """Columns that one program of `add_answers` takes."""
    return min(power_of_two(hidden), _ADD_COLUMNS)


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


_MOST_SORTED = 4096  # pairs that `sort_pairs` reads at once


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeightTable:
    """Weights of a layer's experts as the kernels read them.

    Attributes:
        up: [experts, 2 * inner, hidden size], gates before ups.
        down: [experts, hidden size, inner].
        up_bias, down_bias: [experts, ...], or None.
        clamp: (limit, alpha) of the clamped activation; None means a gated SiLU.
        up_scales, down_scales: float32[experts, row blocks, column blocks], of weights in float8; those of gates before
            those of ups. None means that the weights have no scales.
        block: size of a block.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: tuple[float, float] | None = None
    up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    block: ScaleBlock | None = None

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return self.up.shape[2]

    @property
    def inner(self) -> int:
        """Numbers between the two products."""
        return self.down.shape[2]


class _Tiles(NamedTuple):
    """Tiles of pairs, as in `products.sort_pairs`; or those of one row, as in `products.expert_up`.

    Attributes:
        pairs: int32[pairs]; of one row int64[k], its experts.
        table: int32[1 + 3 * most], the tiles; of one row int32[1], the number of rows.
        most: Tiles for which the table has room.
        tile: Their size.
        is_row: Whether they are those of one row.
    """

    pairs: Tensor
    table: Tensor
    most: int
    tile: Tile
    is_row: bool = False


class CudaExperts:
    """Computes the experts of one layer whole.

    Args:
        kernels: The kernels.
        weights: The weights, whose memory stays where it is.
    """

    def __init__(self, kernels: CudaKernels, weights: ExpertWeightTable) -> None:
        self._kernels, self._weights = kernels, weights
        self.num_experts = len(weights.up)
        self._up, self._down = _addresses(weights.up), _addresses(weights.down)
        scales = weights.up_scales, weights.down_scales
        self._scales = [self._up if each is None else _addresses(each) for each in scales]
        self._blocks = block_options(weights.block)

    def weighted_sum(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor, stream: Tensor | None = None
    ) -> Tensor:
        """[rows, hidden size], the sums of `experts.routed_experts`, added to `stream` where there is one.

        Args:
            hidden: [rows, hidden size].
            topk_ids, topk_weights: [rows, k].
            counts: int64[experts or more], to which the rows of each expert are added.
            stream: [rows, hidden size].
        """
        num_rows, num_chosen = topk_ids.shape
        answers = self._chosen(hidden, topk_ids, counts)
        if topk_weights.dtype is not torch.float32:
            topk_weights = topk_weights.to(torch.float32)
        out, columns = torch.empty_like(answers[:num_rows]), expert_columns(self._weights.hidden)
        launch(
            rows.add_answers, (num_rows, -(-self._weights.hidden // columns)), answers, topk_ids,
            topk_weights.contiguous(), out if stream is None else stream, out,
            self._kernels.count_of(topk_ids),
            topk_ids.stride(0), CHOSEN=num_chosen, WIDE=power_of_two(num_chosen), HIDDEN=self._weights.hidden,
            COLUMNS=columns, HAS_STREAM=stream is not None, num_warps=2,
        )  # fmt: skip
        return out

    def chosen_answers(self, hidden: Tensor, topk_ids: Tensor) -> Tensor:
        """[rows * k, hidden size], what each row's experts answer, not weighted."""
        return self._chosen(hidden, topk_ids, torch.zeros(self.num_experts, dtype=torch.int64, device=hidden.device))

    def _chosen(self, hidden: Tensor, topk_ids: Tensor, counts: Tensor) -> Tensor:
        num_rows, num_chosen = topk_ids.shape
        num_pairs = num_rows * num_chosen
        tile = self._tile(num_pairs / self.num_experts, hidden.dtype)
        if num_rows == 1:
            row = _Tiles(topk_ids.contiguous(), self._kernels.count_of(topk_ids), num_chosen, tile, is_row=True)
            return self._multiply(hidden.contiguous(), num_pairs, num_chosen, row, counts)
        num_tiles = min(num_pairs, self.num_experts + num_pairs // tile.tokens)
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=hidden.device)
        tiles = torch.empty(1 + 3 * num_tiles, dtype=torch.int32, device=hidden.device)
        launch(
            products.sort_pairs, (self.num_experts,), topk_ids, self._kernels.count_of(topk_ids), pairs, tiles, counts,
            topk_ids.stride(0), CHOSEN=num_chosen, EXPERTS=self.num_experts, BINS=power_of_two(self.num_experts),
            TOKENS=tile.tokens, CHUNK=min(power_of_two(num_pairs), _MOST_SORTED),
            num_warps=8 if num_pairs > _MOST_SORTED // 4 else 4,
        )  # fmt: skip
        return self._multiply(hidden.contiguous(), num_pairs, num_chosen, _Tiles(pairs, tiles, num_tiles, tile))

    def answers(self, batches: Sequence[tuple[int, int]], inputs: Tensor, out: Tensor, start: int = 0) -> int:
        """Write what some experts answer, not weighted; arguments and result as `experts.run_batches`."""
        columns = np.array(batches, np.int64).reshape(-1, 2)
        num_rows = int(columns[:, 1].sum())
        if not num_rows:
            return start
        tile = self._tile(num_rows / len(columns), inputs.dtype)
        per_batch = -(-columns[:, 1] // tile.tokens)
        batch = np.repeat(np.arange(len(columns)), per_batch)
        skipped = (np.arange(len(batch)) - (per_batch.cumsum() - per_batch)[batch]) * tile.tokens
        first = (columns[:, 1].cumsum() - columns[:, 1])[batch] + skipped
        table = np.stack([columns[batch, 0], first, np.minimum(columns[batch, 1] - skipped, tile.tokens)], axis=1)
        listed = np.concatenate([[len(batch)], table.ravel()]).astype(np.int32)
        tiles = upload(listed, inputs.device)
        end = start + num_rows
        places = _Tiles(tiles, tiles, len(batch), tile)
        out[start:end] = self._multiply(inputs[start:end].contiguous(), num_rows, 0, places)
        return end

    def _tile(self, rows_of_expert: float, dtype: torch.dtype) -> Tile:
        num_rows = rows_of_expert if self._weights.block is None else min(rows_of_expert, MOST_FLOAT8_ROWS)
        return expert_tile(num_rows, dtype, self._kernels.shared_bytes)

    def _multiply(
        self, hidden: Tensor, num_pairs: int, num_chosen: int, tiles: _Tiles, counts: Tensor | None = None
    ) -> Tensor:
        """[pairs, hidden size], answers by pair; by place with `num_chosen` 0. `counts`: those to add one row to."""
        weights, tile = self._weights, tiles.tile
        inner, answers = (hidden.new_empty(num_pairs, size) for size in (weights.inner, weights.hidden))
        limit, alpha = weights.clamp or (0.0, 0.0)
        sizes = {"HIDDEN": weights.hidden, "INNER": weights.inner}
        tiling = {"TOKENS": tile.tokens, "TAIL": tile.tail, "OUTS": tile.outs, **tile.launch_options, **self._blocks}
        up_bias, down_bias = (answers if each is None else each for each in (weights.up_bias, weights.down_bias))
        launch(
            products.expert_up, (-(-weights.inner // tile.outs), tiles.most), hidden, self._up, up_bias, inner,
            tiles.pairs, tiles.table, hidden.stride(0), limit, alpha, self._scales[0],
            self._up if counts is None else counts, **sizes, CHOSEN=num_chosen, IS_ROW=tiles.is_row,
            HAS_BIAS=weights.up_bias is not None, CLAMPED=weights.clamp is not None,
            DEPTH=tile.depth_of(weights.hidden), **tiling,
        )  # fmt: skip
        launch(
            products.expert_down, (-(-weights.hidden // tile.outs), tiles.most), inner, self._down, down_bias, answers,
            tiles.pairs, tiles.table, self._scales[1], **sizes,
            SCATTERS=num_chosen > 0 and not tiles.is_row, ROW=num_chosen if tiles.is_row else 0,
            HAS_BIAS=weights.down_bias is not None, DEPTH=tile.depth_of(weights.inner), **tiling,
        )  # fmt: skip
        return answers


def _addresses(weights: Tensor) -> Tensor:
    """int64[experts] on the weights' device, the address of each expert's."""
    assert weights.is_contiguous(), "the kernel reads an expert's weights end to end"
    step = weights.stride(0) * weights.element_size()
    first = weights.data_ptr()
    return upload(first + step * np.arange(len(weights), dtype=np.int64), weights.device)
