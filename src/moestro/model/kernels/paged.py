"""Attention over paged K and V on the own kernel, which writes a step's K and V first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from moestro.core.views import LS
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Units
from moestro.model.attention import OWN_ATTENTION, AttentionForm, Scoring, attend_paged
from moestro.model.kernels.library import HEAD_MULTIPLE, KernelLibrary
from moestro.model.kernels.matching import is_close, random_rows
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep

CHECK_BLOCK_SIZE, _LONGEST_CHECK = 4, 64


class KernelAttention:
    """Attention of one layer; implements `attention.OwnAttention`.

    Args:
        library: The kernels.
        sinks: [query heads], as in `Scoring`; None means none.

    Attributes:
        sinks_address: Address of the sinks in float32; None means none.
    """

    def __init__(self, library: KernelLibrary, sinks: Tensor | None) -> None:
        self._attend, self._write = library.function["attend"], library.function["write_slots"]
        self._sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
        self.sinks_address = None if self._sinks is None else self._sinks.data_ptr()

    def __call__(
        self, step: PagedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Implement `OwnAttention`."""
        pools = step.pools.find(layer)
        if pools is None:
            new_rows = (each[0].transpose(0, 1) for each in (key, value))
            pools = step.pools.of_layer(layer, *new_rows, values_in_keys=scoring.values_in_keys)
        keys, values = pools
        query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
        slots = step.write_slots.data_ptr()
        for new, pool in ((key, keys),) if scoring.values_in_keys else ((key, keys), (value, values)):
            _, num_kv_heads, num_tokens, size = new.shape
            token_stride, head_stride = new.stride(2), new.stride(1)
            self._write(
                new.data_ptr(), token_stride, head_stride, slots, num_tokens, num_kv_heads, size, pool.data_ptr()
            )  # fmt: skip
        _, num_heads, num_tokens, key_size = query.shape
        value_size, layout = value.shape[3], step.layout
        out = query.new_empty(1, num_tokens, num_heads, value_size)
        tables, rows, lengths = layout.addresses
        self._attend(
            query.data_ptr(),
            query.stride(2),
            query.stride(1),
            keys.data_ptr(),
            values.data_ptr(),
            tables,
            rows,
            lengths,
            self.sinks_address,
            out.data_ptr(),
            len(layout.lengths),
            layout.tables.shape[1],
            num_heads,
            key.shape[1],
            key_size,
            value_size,
            values.stride(1),
            step.pools.block_size,
            scoring.window or 0,
            key_size**-0.5 if scoring.scaling is None else scoring.scaling,
        )
        return out


def exchange_attention(module: nn.Module, form: AttentionForm, library: KernelLibrary) -> bool:
    """Give an attention module the kernel. Returns whether it computes what `attend_paged` does."""
    sizes = (form.key_size, form.value_size)
    if any(size % HEAD_MULTIPLE for size in sizes):
        return False
    attention = KernelAttention(library, form.scoring.sinks)
    if not _agrees(attention, form, make_check_units(form.scoring.window)):
        return False
    module.__dict__[OWN_ATTENTION] = attention
    return True


def _agrees(attention: KernelAttention, form: AttentionForm, units: Units) -> bool:
    """Compare with torch's attention in float32, over pools with random K and V of earlier tokens."""
    num_tokens, num_blocks = int(units.num_tokens.sum()), int(units.block_tables.max()) + 1
    shapes = {"query": (form.num_heads, form.key_size)}
    shapes |= {"key": (form.num_kv_heads, form.key_size), "value": (form.num_kv_heads, form.value_size)}
    rows = {
        name: random_rows(1, heads, num_tokens, size, seed=seed)
        for seed, (name, (heads, size)) in enumerate(shapes.items())
    }
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        pools = KVPools(num_blocks, CHECK_BLOCK_SIZE)
        query, key, value = (each.to(dtype) for each in rows.values())
        if form.scoring.values_in_keys:
            value = key[..., : form.value_size]
        new = (each[0].transpose(0, 1) for each in (key, value))
        for pool in pools.of_layer(0, *new, values_in_keys=form.scoring.values_in_keys):
            pool[: pools.scratch_slot] = random_rows(*pool[: pools.scratch_slot].shape, seed=3).to(dtype)
        step = PagedStep(units, pools, query.device)
        if dtype is torch.bfloat16:
            results.append(attention(step, 0, query, key, value, form.scoring))
        else:
            sinks = form.scoring.sinks
            scoring = replace(form.scoring, sinks=None if sinks is None else sinks.detach().to(dtype))
            results.append(attend_paged(step, 0, query, key, value, scoring).to(torch.bfloat16))
    return is_close(results[0], results[1])


def make_check_units(window: int | None) -> Units:
    """Make a long unit, a decode and a chunk; longer than the window, where that is affordable."""
    long = min((window or 0) + 23, _LONGEST_CHECK)
    start, num_tokens = np.array([0, long, 5], np.int32), np.array([long, 1, 7], np.int32)
    lengths = -(-(start + num_tokens) // CHECK_BLOCK_SIZE)
    tables = np.zeros((3, lengths.max()), np.int32)
    blocks = np.arange(lengths.sum(), dtype=np.int32)[::-1]
    for unit, (first, count) in enumerate(zip(lengths.cumsum() - lengths, lengths, strict=True)):
        tables[unit, :count] = blocks[first : first + count]
    return Units(
        slot=np.arange(3, dtype=np.int64),
        serial=np.arange(3),
        service_class=np.full(3, LS, np.uint8),
        start=start,
        num_tokens=num_tokens,
        write_start=start,
        logits=np.full(3, LOGITS_LAST, np.uint8),
        block_tables=tables,
        sampling=np.zeros(3, SAMPLING_ROW),
        token_ids=np.zeros(num_tokens.sum(), np.int32),
    )
