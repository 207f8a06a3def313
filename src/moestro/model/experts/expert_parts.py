"""The routed experts of a layer, computed in parts, so that other work may run in between."""

from __future__ import annotations

from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from moestro.model.experts.routed import ExpertsInPlace, PackedExperts, combine, run_batches, sort_by_expert, tag_of
from moestro.model.kernels.packing import WholeExperts


class ExpertParts(Protocol):
    """Experts of some tokens, in ascending id.

    Attributes:
        first_open: the experts below it have answered; the number of experts at the end.
        is_over: whether all experts have answered.
    """

    first_open: int
    is_over: bool

    def advance(self, max_experts: int) -> None:
        """Compute the next experts that have tokens, at most `max_experts`."""
        ...

    def total(self) -> Tensor:
        """[tokens, hidden size], the weighted sums, as `experts.sum_experts`; only when all have answered."""
        ...

    def answers(self, pairs: Tensor) -> Tensor:
        """[n, hidden size], answers that were computed. `pairs`: int64[n], (token, choice) as token * k + choice."""
        ...


def split_experts(
    module: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor
) -> ExpertParts:
    """Begin to compute experts in parts. Arguments as for `experts.sum_experts`; `counts` grows with each part."""
    tag = tag_of(module)
    if tag.in_place is not None:
        return _OnePart(tag.in_place, hidden, topk_ids, topk_weights, counts)
    packed = tag.packed
    if packed is not None and packed.whole is not None:
        return _KernelParts(packed.whole, hidden, topk_ids, topk_weights, counts)
    return _SortedParts(module, hidden, topk_ids, topk_weights, counts)


class _OnePart:
    """All experts at once, so that no accelerator waits; implements `ExpertParts`."""

    def __init__(
        self, whole: ExpertsInPlace, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor
    ) -> None:
        self._compute = partial(whole.weighted_sum, hidden, topk_ids, topk_weights, counts)
        self._num_experts, self._total = len(counts), hidden
        self.first_open, self.is_over = 0, False

    def advance(self, max_experts: int) -> None:
        """Implement `ExpertParts.advance`."""
        self._total = self._compute()
        self.first_open, self.is_over = self._num_experts, True

    def total(self) -> Tensor:
        """Implement `ExpertParts.total`."""
        return self._total

    def answers(self, pairs: Tensor) -> Tensor:
        """Raise: nothing stops between two experts."""
        raise AssertionError("all experts answer at once")


class _KernelParts:
    """On kernels that find an expert's tokens themselves; implements `ExpertParts`."""

    def __init__(
        self, whole: WholeExperts, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor
    ) -> None:
        self._whole, self._counts, self._weights = whole, counts, topk_weights
        self._hidden, self._ids = hidden.contiguous(), topk_ids.contiguous()
        self._answers = hidden.new_empty(*topk_ids.shape, hidden.shape[1])
        self.first_open, self.is_over = 0, False

    def advance(self, max_experts: int) -> None:
        """Implement `ExpertParts.advance`."""
        self.first_open = self._whole.chosen_answers(
            self._hidden, self._ids, self._answers, self._counts, self.first_open, max_experts
        )
        self.is_over = self.first_open == self._whole.num_experts

    def total(self) -> Tensor:
        """Implement `ExpertParts.total`."""
        return self._whole.add_answers(self._answers, self._ids, self._weights)

    def answers(self, pairs: Tensor) -> Tensor:
        """Implement `ExpertParts.answers`."""
        return self._answers.flatten(0, 1).index_select(0, pairs)


class _SortedParts:
    """On rows ordered by expert, whose numbers the host reads; implements `ExpertParts`."""

    def __init__(
        self, module: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, counts: Tensor
    ) -> None:
        self._module, self._counts, self._weights = cast(PackedExperts, module), counts, topk_weights
        self._packed = tag_of(module).packed
        self._by_expert, self._rows, of_each = sort_by_expert(module, hidden, topk_ids)
        self._open = [(expert, count) for expert, count in enumerate(of_each.tolist()) if count]
        self._done, self._num_done = torch.empty_like(self._rows), 0
        self._num_experts = len(of_each)
        self.first_open, self.is_over = 0, not self._open

    def advance(self, max_experts: int) -> None:
        """Implement `ExpertParts.advance`."""
        batch, self._open = self._open[:max_experts], self._open[max_experts:]
        self._num_done = run_batches(
            self._module, batch, self._rows, self._done, start=self._num_done, packed=self._packed
        )
        for expert, count in batch:
            self._counts[expert] += count
        self.is_over = not self._open
        self.first_open = self._open[0][0] if self._open else self._num_experts

    def total(self) -> Tensor:
        """Implement `ExpertParts.total`."""
        return combine(self._done, self._by_expert, self._weights)

    def answers(self, pairs: Tensor) -> Tensor:
        """Implement `ExpertParts.answers`."""
        place = torch.empty_like(self._by_expert)
        place[self._by_expert] = torch.arange(len(place), device=place.device)
        return self._done.index_select(0, place[pairs])
