"""The torch device that works in stages.

On a CPU it works while it is polled, one piece a poll. An accelerator works while the host continues, at most a few
pieces ahead, so that urgent work soon gets its turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from moestro.core.stages import (
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Merge,
    Merged,
    StageItem,
    StageResult,
    StageShape,
    Stopped,
)
from moestro.core.work import BlockMoves, Int32s
from moestro.model.experts.expert_pieces import ExpertRunner, Pieces, Progress
from moestro.model.pools import KVPools
from moestro.model.staged.stage_pieces import RecordedLayers, StageRunner
from moestro.model.staged.staged_network import StagedNetwork

_PIECES_AHEAD = 2  # on an accelerator: one piece in progress, and one so that it never waits for the host
_OVER = object()


@dataclass(slots=True, eq=False)
class _LaunchedItem:
    """An item in progress.

    Attributes:
        progress: what of the item is computed, as the executor reads it.
        pieces: iterator that does one piece with each `next`.
        events: one event for each piece that an accelerator may still be computing.
        is_over: whether all pieces were begun.
    """

    progress: Progress
    pieces: Pieces
    events: deque[Any] = field(default_factory=deque)  # torch.cuda.Event, whose methods torch leaves untyped
    is_over: bool = False


class ExpertTorchDevice:
    """Computes `Experts` items for tokens of other workers: the device of an expert worker.

    Args:
        runner: the experts, and memory of the tokens.

    Attributes:
        shape: sizes of the device.
        network: the network, or the part of it that the worker keeps.
    """

    def __init__(self, runner: ExpertRunner | StageRunner) -> None:
        self.shape = runner.shape
        self.network = runner.network
        self._runner = runner
        self._device = runner.network.device
        self._is_cpu = self._device.type == "cpu"
        self._running: deque[_LaunchedItem] = deque()

    @property
    def works_when_polled(self) -> bool:
        """Whether polling does the work: true on a CPU."""
        return self._is_cpu

    def launch(self, item: StageItem, now_ns: int) -> None:
        """Start `item`. Items that touch the same blocks, rows or places run in launch order."""
        if not self._running:
            self.network.adopt_kernels()
        progress = Progress(item)
        self._running.append(_LaunchedItem(progress, self._runner.pieces(progress)))
        if not self._is_cpu:
            self._work_ahead()

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Raise: a device without attention keeps no KV."""
        raise AssertionError("a device without attention keeps no KV")

    def poll(self, now_ns: int) -> list[StageResult]:
        """Do, or wait for, one piece. Returns the result of the item that this piece completed."""
        if not self._running:
            return []
        first = self._running[0]
        if self._is_cpu:
            self._do_piece(first)
        else:
            if first.events:
                first.events.popleft().synchronize()  # releases the interpreter to other threads
            self._work_ahead()
        if not first.is_over or first.events:
            return []
        self._running.popleft()
        return [_result(first.progress)]

    def withdraw(self, now_ns: int) -> None:
        """Begin no more pieces of items that can stop between two pieces."""
        for launched in self._running:
            launched.progress.is_withdrawn = True

    def ready_at_ns(self) -> int | None:
        """Return None, because only the hardware knows."""
        return None

    @property
    def vector_form(self) -> tuple[int, torch.dtype]:
        """Hidden size and dtype of the vectors that it reads and stores for messages."""
        return self._runner.arena.vector_form

    def read_inputs(self, places: Int32s) -> Tensor:
        """[n, hidden size], inputs of the experts at `places`, which may repeat."""
        with torch.inference_mode():
            return self._runner.arena.read_inputs(places)

    def read_contributions(self, places: Int32s, choices: Int32s) -> Tensor:
        """[n, hidden size], unweighted answer of the expert of each (place, choice)."""
        with torch.inference_mode():
            return self._runner.arena.read_contributions(places, choices)

    def store_inputs(self, places: Int32s, inputs: Tensor) -> None:
        """Store inputs of experts that were computed on another device. `inputs`: [n, hidden size]."""
        with torch.inference_mode():
            self._runner.arena.write_inputs(places, inputs)

    def store_contributions(self, places: Int32s, choices: Int32s, contributions: Tensor) -> None:
        """Store the answer of each (place, choice), computed on another device. `contributions`: [n, hidden size]."""
        with torch.inference_mode():
            self._runner.arena.write_contributions(places, choices, contributions)

    def _do_piece(self, launched: _LaunchedItem) -> None:
        with torch.inference_mode():
            launched.is_over = next(launched.pieces, _OVER) is _OVER

    def _work_ahead(self) -> None:
        """Begin pieces, in order, while the accelerator has few unfinished ones."""
        ahead = sum(len(launched.events) for launched in self._running)
        for launched in self._running:
            while not launched.is_over and ahead < _PIECES_AHEAD:
                self._do_piece(launched)
                event = cast(Any, torch.cuda.Event)()
                event.record(torch.cuda.current_stream(self._device))
                launched.events.append(event)
                ahead += 1


class StagedTorchDevice(ExpertTorchDevice):
    """Computes stage items.

    Args:
        staged: the network.
        pools: its KV cache.
        shape: numbers of rows and places for tokens inside the network.
        piece_bytes: weight bytes below which several experts form one piece, which nothing interrupts. None means what
            the device reads in `expert_pieces.PIECE_S`.

    Attributes:
        pools, staged: as above.
    """

    def __init__(
        self, staged: StagedNetwork, pools: KVPools, shape: StageShape, piece_bytes: int | None = None
    ) -> None:
        stages = StageRunner(staged, pools, shape, piece_bytes)
        super().__init__(stages)
        self.pools = pools
        self.staged = staged
        self._stages = stages

    def replay(self, layers: RecordedLayers | None) -> None:
        """Replay recorded layers from now on, wherever one fits."""
        self._stages.replay(layers)

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Implement `StagedDevice.move_blocks`."""
        self.pools.move_blocks(moves)


def _result(progress: Progress) -> StageResult:
    """Result of an item that is over."""
    if progress.result is not None:
        return progress.result.read()
    match progress.item:
        case Attention():
            return AttentionDone(_ids(progress.topk_ids))
        case Experts():
            return ExpertsDone(progress.num_batches)
        case Merge():
            return Merged()
    counts = None if progress.counts is None else progress.counts.cpu().numpy()
    return Stopped(progress.layer, _ids(progress.topk_ids), progress.first_open, counts)


def _ids(topk_ids: Tensor | None) -> Int32s | None:
    return None if topk_ids is None else topk_ids.numpy()
