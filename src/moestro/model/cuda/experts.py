"""Routed experts on the kernels. Weights are found by their addresses, so that an expert may move to other memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moestro.model.attention import STEP_ARGUMENT, AttentionForm
from moestro.model.cuda.functions import CudaKernels, HeadNorms, Norm, block_options, expert_columns
from moestro.model.cuda.launch import launch
from moestro.model.cuda.source import products, rows
from moestro.model.cuda.tiles import MOST_FLOAT8_ROWS, Tile, expert_tile, power_of_two
from moestro.model.cuda.units import Walk
from moestro.model.float8 import Float8Linear, Float8Weight, ScaleBlock
from moestro.model.kernels.rows import NORM_EPSILON
from moestro.model.step import PagedStep
from moestro.model.upload import upload

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
