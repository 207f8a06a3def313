"""The kernels as functions of tensors, for one network."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from moestro.model.attention import AttentionForm
from moestro.model.cuda.launch import launch
from moestro.model.cuda.source import attend as attention
from moestro.model.cuda.source import products, rows
from moestro.model.cuda.tiles import (
    MOST_FLOAT8_ROWS,
    MOST_PARTS_ROWS,
    NARROW_ROWS,
    SPLIT,
    attention_keys,
    attention_options,
    dense_tile,
    num_segments,
    power_of_two,
    shared_bytes_of,
)
from moestro.model.cuda.units import StepUnits, Walk, assemble, columns_of
from moestro.model.float8 import Float8Weight, ScaleBlock
from moestro.model.step import PagedStep
from moestro.model.upload import upload, upload_all

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
