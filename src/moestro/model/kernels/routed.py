"""Routed experts with a gated SiLU on the own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from moestro.model.experts.expert_slots import pack_experts
from moestro.model.experts.routed import PackedExperts, retag, run_batches, tag_of
from moestro.model.kernels.layout import KernelPacking
from moestro.model.kernels.library import ROW_MULTIPLE, KernelLibrary
from moestro.model.kernels.matching import NUM_CHECK_ROWS, is_close, is_rowwise, random_rows
from moestro.model.kernels.packing import PackedSlots


class KernelExperts:
    """Computes experts whole; implements `model.packing.WholeExperts`.

    Args:
        library: The kernels.
        sizes: Hidden size, and half of the up weight's outputs.
        slots: As `PackedSlots.slots`.

    Attributes:
        num_experts: Number of slots.
    """

    def __init__(self, library: KernelLibrary, sizes: tuple[int, int], slots: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._library, self._sizes, self._slots = library, sizes, slots
        self.num_experts = len(slots)
        self._answers, self._routed = library.function["expert_answers"], library.function["routed_experts"]
        self._chosen, self._add = library.function["chosen_answers"], library.function["add_answers"]
        # The kernels read tables of addresses.
        self._tables = [np.array([pair[i].data_ptr() for pair in slots], np.uint64) for i in range(2)]
        self._addresses = [table.ctypes.data for table in self._tables]

    def rebound(self, slots: Sequence[tuple[Tensor, Tensor]]) -> KernelExperts:
        """Implement `WholeExperts.rebound`."""
        return KernelExperts(self._library, self._sizes, slots)

    def answers(self, batches: Sequence[tuple[int, int]], rows: Tensor, out: Tensor, start: int) -> int:
        """Implement `WholeExperts.answers`."""
        assert out.is_contiguous(), "answers are written row by row"
        columns = np.array(batches, np.int64).reshape(-1, 2).T.copy()
        rows = rows.contiguous()
        skipped = start * self._sizes[0] * rows.element_size()
        self._answers(
            rows.data_ptr() + skipped,
            columns[0].ctypes.data,
            columns[1].ctypes.data,
            len(batches),
            *self._addresses,
            out.data_ptr() + skipped,
            *self._sizes,
        )
        return start + int(columns[1].sum())

    def weighted_sum(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor) -> Tensor:
        """Implement `WholeExperts.weighted_sum`."""
        num_tokens, num_chosen = topk_ids.shape
        hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        out = torch.empty_like(hidden)
        self._routed(
            hidden.data_ptr(),
            topk_ids.data_ptr(),
            weights.data_ptr(),
            *self._addresses,
            out.data_ptr(),
            counts.data_ptr(),
            num_tokens,
            num_chosen,
            self.num_experts,
            *self._sizes,
        )
        return out

    def chosen_answers(
        self, hidden: Tensor, topk_ids: Tensor, out: Tensor, counts: Tensor, begin: int, max_experts: int
    ) -> int:
        """Implement `WholeExperts.chosen_answers`."""
        num_tokens, num_chosen = topk_ids.shape
        assert all(each.is_contiguous() for each in (hidden, topk_ids, out)), "the kernel reads rows end to end"
        end: int = self._chosen(
            hidden.data_ptr(),
            topk_ids.data_ptr(),
            *self._addresses,
            out.data_ptr(),
            counts.data_ptr(),
            begin,
            max_experts,
            num_tokens,
            num_chosen,
            self.num_experts,
            *self._sizes,
        )
        return end

    def add_answers(self, answers: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Implement `WholeExperts.add_answers`."""
        num_tokens, num_chosen, hidden = answers.shape
        assert all(each.is_contiguous() for each in (answers, topk_ids)), "the kernel reads rows end to end"
        weights = topk_weights.to(torch.float32).contiguous()
        out = answers.new_empty(num_tokens, hidden)
        self._add(
            answers.data_ptr(),
            topk_ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            num_tokens,
            num_chosen,
            hidden,
        )
        return out


def exchange_experts(module: nn.Module, library: KernelLibrary, packing: KernelPacking) -> bool:
    """Give a tagged experts module the kernels' products, and the whole kernel if its activation is a gated SiLU.

    Returns:
        Whether the batch no longer changes the bits of its answers.
    """
    tag, experts = tag_of(module), cast(PackedExperts, module)
    up, down = tag.layout[0], tag.layout[2]
    assert up is not None
    assert down is not None
    num_wide, hidden = up[0][::-1] if experts.is_transposed else up[0]
    inner = down[0][0] if experts.is_transposed else down[0][1]
    if tag.dtype is not torch.bfloat16 or hidden % 2 or inner % 2:
        return False
    pack_experts(module, packing)
    packed = tag_of(module).packed
    assert packed is not None
    if not packed.slots:
        return True
    # An expert that is here, or one of random weights where all slots are empty.
    one = next((pair for pair in packed.slots if pair[0].numel()), None)
    if one is None:
        drawn = random_rows(num_wide, hidden) * hidden**-0.5, random_rows(hidden, inner) * inner**-0.5
        one = packing.pack(drawn[0]), packing.pack(drawn[1])

    def run(rows: Tensor, whole: KernelExperts | None = None) -> Tensor:
        out = torch.empty_like(rows)
        run_batches(experts, [(0, len(rows))], rows, out, packed=PackedSlots(packing, (one,), whole))
        return out

    if not _has_plain_form(experts) or num_wide != 2 * inner or hidden % ROW_MULTIPLE or inner % ROW_MULTIPLE:
        return is_rowwise(run, hidden)
    rows = random_rows(NUM_CHECK_ROWS, hidden)
    if not is_close(run(rows, KernelExperts(library, (hidden, inner), (one,))), run(rows)):
        return is_rowwise(run, hidden)
    retag(module, packed=replace(packed, whole=KernelExperts(library, (hidden, inner), packed.slots)))
    return True


def _has_plain_form(experts: PackedExperts) -> bool:
    """Whether experts have two halves of up weights, no bias, and nothing behind the down weights."""
    return experts.has_gate and not experts.has_bias and not getattr(experts, "has_post_expert_norm", False)
