"""Inputs of GPU kernels, and what they should compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from parity.drive import make_units
from torch import Tensor
from torch.nn import functional

from moestro.model.attention import AttentionForm, Scoring
from moestro.model.cuda.functions import CudaExperts, CudaKernels, ExpertWeightTable
from moestro.model.cuda.tiles import Walk
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep

NAN = float("nan")


def random(*shape: int, seed: int) -> Tensor:
    """float32 of a normal distribution, the same on any device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Distance of all numbers, relative to the size of those that are wanted. NaN if one is."""
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def bound_of(dtype: torch.dtype) -> float:
    """Error that rounding may cause."""
    return 1e-2 if dtype == torch.bfloat16 else 2e-6


class Part(NamedTuple):
    """A unit of a step: the last `new` of `length` tokens of a sequence. `seed` decides all numbers of the sequence."""

    length: int
    new: int
    seed: int = 0


@dataclass(eq=False)
class AttentionCase:
    """Attention of one step over pools with NaN in every slot that no sequence wrote.

    Attributes:
        kernels: The kernels.
        form: Form of the attention.
        parts: Units of the step.
        block_size: Tokens of a block.
        seed: Order of the blocks.
    """

    kernels: CudaKernels
    form: AttentionForm
    parts: list[Part]
    block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        form = self.form
        sizes = [-(-part.length // self.block_size) for part in self.parts]
        num_blocks = sum(sizes) + 1  # the last one belongs to none, and pads tables
        order = np.random.default_rng(self.seed).permutation(num_blocks - 1)
        tables = np.full((len(sizes), max(sizes) + 1), num_blocks - 1, np.int32)
        shapes = [(form.num_kv_heads, form.key_size), (form.num_kv_heads, form.value_size)]
        self.pools = tuple(torch.full((num_blocks * self.block_size, *shape), NAN) for shape in shapes)
        self.sequences, queries, begin = [], [], 0
        for part, size, table in zip(self.parts, sizes, tables, strict=True):
            table[:size] = order[begin : begin + size]
            begin += size
            seeds = range(3 * part.seed, 3 * part.seed + 3)
            shapes_of = [(form.num_heads, form.key_size), *shapes]
            query, key, value = (
                random(part.length, *shape, seed=seed).to(self.kernels.dtype)
                for shape, seed in zip(shapes_of, seeds, strict=True)
            )
            at = np.arange(part.length)
            slots = torch.from_numpy(table[at // self.block_size].astype(np.int64) * self.block_size)
            for pool, rows in zip(self.pools, (key, value), strict=True):
                pool[slots + torch.from_numpy(at % self.block_size)] = rows.float()
            queries.append(query[part.length - part.new :])
            self.sequences.append((queries[-1], key, value))
        self.pools = tuple(pool.to(self.kernels.device, self.kernels.dtype) for pool in self.pools)
        self.query = torch.cat(queries).to(self.kernels.device)
        units = make_units([(part.length - part.new, [0] * part.new) for part in self.parts], tables)
        self.step = PagedStep(units, KVPools(num_blocks, self.block_size), self.kernels.device)

    def found(self) -> Tensor:
        """What the kernels compute."""
        form = self.form
        self.kernels.add_walk(Walk.of(form))
        units = self.kernels.units_of(self.step)
        return self.kernels.attend(self.query, self.pools, units, form, self.block_size)

    def last_row(self, unit: int = 0) -> Tensor:
        """What the kernels compute of the newest token of a unit."""
        return self.found()[int(self.step.end_row_of[unit]) - 1].cpu()

    def wanted(self) -> Tensor:
        """The same in float64."""
        return torch.cat([self._attend(*sequence) for sequence in self.sequences])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        form, length, new = self.form, len(key), len(query)
        shared = form.num_heads // form.num_kv_heads
        key, value = (each.double().repeat_interleave(shared, 1) for each in (key, value))
        scaling, sinks, window = form.scoring.scaling, form.scoring.sinks, form.scoring.window
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * (scaling or form.key_size**-0.5)
        position, at = torch.arange(length - new, length)[:, None], torch.arange(length)
        sees = at <= position if window is None else (at <= position) & (at > position - window)
        scores = scores.masked_fill(~sees, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().cpu()[:, None, None].expand(-1, new, 1)], -1)
            value = torch.cat([value, torch.zeros_like(value[:1])])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def make_form(
    num_heads: int, num_kv_heads: int, key_size: int, value_size: int | None = None, *,
    window: int | None = None, sinks: Tensor | None = None, scaling: float | None = None,
) -> AttentionForm:  # fmt: skip
    """A form of attention; values are as wide as keys unless `value_size` says otherwise."""
    return AttentionForm(num_heads, num_kv_heads, key_size, value_size or key_size, Scoring(scaling, window, sinks))


class ExpertCase:
    """Routed experts of one layer, their weights in order of gate and up.

    Args:
        kernels: The kernels.
        num_experts, hidden, inner: Sizes.
        clamp: As in `ExpertWeightTable`; with it experts have biases.
    """

    def __init__(
        self, kernels: CudaKernels, num_experts: int, hidden: int, inner: int, clamp: tuple[float, float] | None = None
    ) -> None:
        def weights(*shape: int, seed: int, scale: float) -> Tensor:
            return (random(*shape, seed=seed) * scale).to(kernels.device, kernels.dtype)

        self.kernels, self.num_experts, self.clamp = kernels, num_experts, clamp
        self.up = weights(num_experts, 2 * inner, hidden, seed=1, scale=hidden**-0.5)
        self.down = weights(num_experts, hidden, inner, seed=2, scale=inner**-0.5)
        biases = [None, None]
        if clamp is not None:
            self.up *= 4  # so that some numbers are clamped
            biases = [weights(num_experts, size, seed=3 + size, scale=1.0) for size in (2 * inner, hidden)]
        self.up_bias, self.down_bias = biases
        self.experts = CudaExperts(kernels, ExpertWeightTable(self.up, self.down, *biases, clamp))

    def rows(self, num_rows: int) -> Tensor:
        """Hidden states."""
        return random(num_rows, self.up.shape[2], seed=9).to(self.kernels.device, self.kernels.dtype)

    def choice(self, num_rows: int, num_chosen: int) -> tuple[Tensor, Tensor]:
        """(experts, weights) of rows, the first experts more often."""
        draw = np.random.default_rng(num_rows)
        likely = np.arange(self.num_experts, 0, -1.0) ** 2
        ids = [draw.choice(self.num_experts, num_chosen, False, likely / likely.sum()) for _ in range(num_rows)]
        weights = torch.from_numpy(draw.dirichlet(np.ones(num_chosen), num_rows)).float()
        return torch.from_numpy(np.stack(ids)).to(self.kernels.device), weights.to(self.kernels.device)

    def counts(self) -> Tensor:
        """Counts of experts, one each."""
        return torch.ones(self.num_experts, dtype=torch.int64, device=self.kernels.device)

    def weighted_sum(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the kernels compute."""
        return self.experts.weighted_sum(rows, ids, weights, self.counts())

    def wanted(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same in float64."""
        rows, ids, weights = rows.double().cpu(), ids.cpu(), weights.double().cpu()
        out = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            row, choice = (ids == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, self.answer(expert, rows[row]) * weights[row, choice, None])
        return out

    def answer(self, expert: int, rows: Tensor) -> Tensor:
        """What one expert answers to rows, in float64 on the CPU."""

        def of_expert(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight[expert].double().cpu()

        gate, up = functional.linear(rows, of_expert(self.up), of_expert(self.up_bias)).chunk(2, -1)
        if self.clamp is None:
            inner = functional.silu(gate) * up
        else:
            limit, alpha = self.clamp
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
        return functional.linear(inner, of_expert(self.down), of_expert(self.down_bias))
