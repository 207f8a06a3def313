"""Expert batches as pieces: the device can stop between any two of them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moestro.core.stages import Experts, StageItem, StageShape
from moestro.model.arena import Arena, TokenForm
from moestro.model.experts import can_group, run_batches, run_grouped, tag_of
from moestro.model.network import Network
from moestro.model.results import PendingResult
from moestro.model.upload import upload

# A look-up after each expert would cost more than a small expert takes. A CPU reads this many bytes in some 100 µs.
PIECE_BYTES = 2 << 20

Pieces = Generator[None, None, None]


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
        piece_bytes: weight bytes below which several experts form one piece.

    Attributes:
        network, shape: as above.
        arena: memory of the tokens.
        num_a_piece: experts that form one piece.
    """

    def __init__(self, network: Network, form: TokenForm, shape: StageShape, piece_bytes: int = PIECE_BYTES) -> None:
        self.network, self.shape = network, shape
        self._experts = dict(network.experts)
        self.num_a_piece = max(piece_bytes // max(network.bytes_per_expert, 1), 1)
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
            for batch in self.split(item.layer, inputs, pairs):
                if progress.num_batches:
                    yield
                if progress.is_withdrawn:
                    break
                end = self.run_batch(item.layer, inputs, done, end, batch)
                progress.num_batches += len(batch)
            if end:
                self.arena.write_contributions(item.places[:end], item.choices[:end], done[:end])

    def split(self, layer: int, rows: Tensor, pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Split (slot, its rows) into pieces."""
        size = self.num_a_piece
        if rows.is_cuda and can_group(self._experts[layer], rows):
            size = len(pairs)
        return [pairs[first : first + size] for first in range(0, len(pairs), size)]

    def run_batch(self, layer: int, rows: Tensor, done: Tensor, begin: int, batch: list[tuple[int, int]]) -> int:
        """Fill `done` from `begin` with the answers of the batch's slots to `rows`. Returns the end of that part."""
        module = self._experts[layer]
        if rows.is_cuda and can_group(module, rows):
            counts = np.zeros(self.shape.num_experts, np.int64)
            counts[[slot for slot, _ in batch]] = [count for _, count in batch]
            end = begin + int(counts.sum())
            done[begin:end] = run_grouped(module, rows[begin:end], upload(counts, self.network.device))
            return end
        return run_batches(module, batch, rows, done, start=begin, packed=tag_of(module).packed)

    def run_whole(self, layer: int, rows: Tensor, counts: Tensor) -> Tensor | None:
        """[rows, hidden size], answers of all experts of a layer, if the host need not read `counts` for that.

        Args:
            rows: [rows, hidden size], ordered by expert.
            counts: int64[experts], rows of each.
        """
        module = self._experts[layer]
        return run_grouped(module, rows, counts) if rows.is_cuda and can_group(module, rows) else None
