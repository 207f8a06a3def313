"""Expert batches as pieces, and a layer's experts in parts: the device can stop between any two of them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from moestro.core.stages import Experts, StageItem, StageShape
from moestro.model.experts.routed import (
    ExpertsInPlace,
    PackedExperts,
    can_group,
    combine,
    in_place_of,
    run_batches,
    run_grouped,
    sort_by_expert,
    tag_of,
)
from moestro.model.kernels.packing import WholeExperts
from moestro.model.network import Network
from moestro.model.staged.arena import Arena, TokenForm
from moestro.model.step import PendingResult
from moestro.model.tensors import upload

# New work waits at most for the piece under way. On a CPU pieces of half as long made a step 3 to 4 % longer than one
# without pieces, these 1 to 3 % (640M model, docs/flow.md). An expert that takes longer is computed as one piece.
PIECE_S = 800e-6


@dataclass(frozen=True, slots=True)
class ReadRate:
    """How fast a kind of device goes through weights.

    Attributes:
        bytes_per_s: weights that it reads in a second.
        rows: rows that it computes in the time in which it reads their weights; more rows take as much longer.
    """

    bytes_per_s: float
    rows: int

    @property
    def piece_bytes(self) -> int:
        """Weights that are read in the time of a piece."""
        return int(self.bytes_per_s * PIECE_S)


# A core; and an accelerator, of which slow ones read about so much and fast ones twice to three times that. A card that
# is much slower has longer pieces, and one that is faster shorter ones, of which it still takes dozens a step.
READ_RATES = {"cpu": ReadRate(21e9, 8), "cuda": ReadRate(1.35e12, 256)}

Pieces = Generator[None, None, None]


class PieceMeter:
    """Measures the work of a piece by the weights that it reads, which more rows read more often.

    Args:
        piece_bytes: bytes after which a piece ends.
        rows_a_read: rows that one read of their weights suffices for.
    """

    def __init__(self, piece_bytes: int, rows_a_read: int) -> None:
        self._piece_bytes = self._left = piece_bytes
        self._rows_a_read = rows_a_read

    @property
    def is_full(self) -> bool:
        """Whether the piece ends."""
        return self._left <= 0

    def restart(self) -> None:
        """Begin a piece."""
        self._left = self._piece_bytes

    def spend(self, num_bytes: int, num_rows: int) -> None:
        """Count weights through which so many rows went."""
        self._left -= self._bytes_read(num_bytes, num_rows)

    def take(self, expert_bytes: int, num_pairs: int, num_experts: int, *, is_one_call: bool = False) -> int:
        """Count the work of as many experts as fit in the piece, and at least of one.

        Args:
            expert_bytes: weights of one expert.
            num_pairs: rows of all experts.
            num_experts: experts that have rows.
            is_one_call: whether all experts are computed at once, fit or not.

        Returns:
            The number of experts counted.
        """
        each = max(self._bytes_read(expert_bytes, num_pairs // num_experts), 1)
        taken = num_experts if is_one_call else min(max(self._left // each, 1), num_experts)
        self._left -= taken * each
        return taken

    def _bytes_read(self, num_bytes: int, num_rows: int) -> int:
        return num_bytes * max(num_rows // self._rows_a_read, 1)


@dataclass(slots=True, eq=False)
class Progress:
    """Progress of an item.

    Attributes:
        item: the item.
        is_withdrawn: whether it stops before its next piece.
        num_batches: batches of an `Experts` begun so far.
        layer, first_open: position of a `Passage`'s units; see `core.stages.Stopped`.
        topk_ids: int32[tokens, k] on its way to the host, for units that stopped among the experts of a layer.
        counts: int64[layers, experts] of a `Passage`.
        result: result of units that left the last layer.
    """

    item: StageItem
    is_withdrawn: bool = False
    num_batches: int = 0
    layer: int = 0
    first_open: int = 0
    topk_ids: Tensor | None = None
    counts: Tensor | None = None
    result: PendingResult | None = None


class ExpertRunner:
    """Runs `Experts` items on the experts of a network, by slot.

    Args:
        network: the network; of an expert worker, its experts alone.
        form: state of a token.
        shape: sizes of the device.
        piece_bytes: as for `PieceMeter`. None means what the device reads in `PIECE_S`.

    Attributes:
        network, shape: as above.
        arena: memory of the tokens.
    """

    def __init__(self, network: Network, form: TokenForm, shape: StageShape, piece_bytes: int | None = None) -> None:
        self.network, self.shape = network, shape
        self._experts = dict(network.experts)
        rate = READ_RATES[network.device.type]
        self._piece_bytes, self._rows_a_read = piece_bytes or rate.piece_bytes, rate.rows
        self.arena = Arena(shape, form, network.device)

    def pieces(self, progress: Progress) -> Pieces:
        """A generator that does one piece of an `Experts` item at each `next`."""
        assert isinstance(progress.item, Experts), "a device without attention computes experts only"
        return self._run(progress.item, progress)

    def _run(self, item: Experts, progress: Progress) -> Pieces:
        if len(item.places):
            inputs = self.arena.read_inputs(item.places)
            done, end = torch.empty_like(inputs), 0
            pairs = list(zip(item.experts.tolist(), item.counts.tolist(), strict=True))
            for batch in self._split(item.layer, inputs, pairs):
                if progress.num_batches:
                    yield
                if progress.is_withdrawn:
                    break
                end = self._run_batch(item.layer, inputs, done, end, batch)
                progress.num_batches += len(batch)
            if end:
                self.arena.write_contributions(item.places[:end], item.choices[:end], done[:end])

    def module(self, layer: int) -> nn.Module:
        """Experts module of a layer."""
        module: nn.Module = self._experts[layer]
        return module

    def meter(self) -> PieceMeter:
        """Make a meter of pieces."""
        return PieceMeter(self._piece_bytes, self._rows_a_read)

    def is_grouped(self, layer: int, rows: Tensor) -> bool:
        """Whether all experts of a layer are one call that an accelerator computes."""
        experts = self._experts[layer]
        return in_place_of(experts) is not None or (rows.is_cuda and can_group(experts, rows))

    def _split(self, layer: int, rows: Tensor, pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Split (slot, its rows) into pieces."""
        num_rows = sum(count for _, count in pairs)
        is_grouped = self.is_grouped(layer, rows)
        size = self.meter().take(self.network.bytes_per_expert, num_rows, len(pairs), is_one_call=is_grouped)
        return [pairs[first : first + size] for first in range(0, len(pairs), size)]

    def _run_batch(self, layer: int, rows: Tensor, done: Tensor, begin: int, batch: list[tuple[int, int]]) -> int:
        """Fill `done` from `begin` with the answers of the batch's slots to `rows`. Returns the end of that part."""
        module = self._experts[layer]
        if in_place_of(module) is None and self.is_grouped(layer, rows):
            counts = np.zeros(self.shape.num_experts, np.int64)
            counts[[slot for slot, _ in batch]] = [count for _, count in batch]
            end = begin + int(counts.sum())
            done[begin:end] = run_grouped(module, rows[begin:end], upload(counts, self.network.device))
            return end
        return run_batches(module, batch, rows, done, start=begin, packed=tag_of(module).packed)


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
