"""The torch device that works in stages, in pieces between which it can stop, and how it is opened.

On a CPU it works while it is polled, one piece a poll. An accelerator works while the host continues, at most a few
pieces ahead, so that urgent work soon gets its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from moestro.core.request import ModelInfo
from moestro.core.stages import (
    NUM_PLANS,
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Merge,
    Merged,
    Merges,
    Passage,
    Sample,
    StageItem,
    StageResult,
    StageShape,
    Stopped,
)
from moestro.core.work import BlockMoves, Int32s, Units
from moestro.errors import ConfigError
from moestro.model.channels import copy_to_host
from moestro.model.device import CheckedNetwork, open_network
from moestro.model.experts.expert_pieces import ExpertParts, ExpertRunner, PieceMeter, Pieces, Progress, split_experts
from moestro.model.experts.routed import sum_experts
from moestro.model.network import WorkerShare
from moestro.model.pools import KVPools
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.staged.arena import Index
from moestro.model.staged.layer_stages import Attended
from moestro.model.staged.staged_network import Fragment, Fragments, StagedNetwork
from moestro.model.step import compute_result, to_host
from moestro.model.tensors import upload


class ReplayedUnits(Protocol):
    """Layers of some units that are replayed. What one returns is overwritten by the next.

    Both take the layer's input [tokens, hidden size], and return None for a layer that is not recorded.
    """

    def attend(self, layer: int, hidden: Tensor) -> Attended | None:
        """Compute the result of `StagedNetwork.attend`."""
        ...

    def whole(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Compute the output of the layer, and add the tokens of each expert to `RecordedLayers.counts`."""
        ...


class RecordedLayers(Protocol):
    """Layers that were recorded and are replayed.

    Attributes:
        counts: int64[layers, experts], tokens that the experts of layers replayed whole have computed.
    """

    counts: Tensor

    def open(self, fragment: Fragment) -> ReplayedUnits | None:
        """Let the next replays compute a fragment's units; None if no record fits them."""
        ...


class StageRunner:
    """Runs items on a network, piece by piece.

    Args:
        staged: the network.
        pools: its KV cache.
        shape: numbers of rows and places for tokens inside the network.
        piece_bytes: as for `ExpertRunner`.

    Attributes:
        network: the network.
        shape: as above.
        arena: memory of the tokens inside the network.
    """

    def __init__(self, staged: StagedNetwork, pools: KVPools, shape: StageShape, piece_bytes: int | None) -> None:
        self._staged, self.network, self.shape = staged, staged.network, shape
        self._experts = ExpertRunner(staged.network, staged.token_form(shape.num_chosen), shape, piece_bytes)
        self.arena = self._experts.arena
        self._fragments = Fragments(staged, pools, self.arena)
        self._recorded: RecordedLayers | None = None

    def replay(self, layers: RecordedLayers | None) -> None:
        """Replay recorded layers from now on, wherever one fits."""
        self._recorded = layers

    def pieces(self, progress: Progress) -> Pieces:
        """A generator that does one piece of the item at each `next`."""
        match progress.item:
            case Attention() as item:
                return self._attend(item, progress)
            case Experts():
                return self._experts.pieces(progress)
            case Merge() as item:
                return self._merge(item)
            case Passage() as item:
                return self._pass(item, progress)
            case Sample() as item:
                return self._sample(item, progress)

    def _attend(self, item: Attention, progress: Progress) -> Pieces:
        fragment, hidden = self._begin(item)
        replayed = None if self._recorded is None else self._recorded.open(fragment)
        attended = None if replayed is None else replayed.attend(item.layer, hidden)
        if attended is None:
            attended = self._staged.attend(item.layer, hidden, fragment.arguments(item.layer), fragment.chosen)
        if attended.inputs is None:
            self.arena.write_hidden(fragment.rows, attended.hidden)
        else:
            ids = self.arena.write_attended(fragment.rows, self.arena.index(item.places), attended)
            progress.topk_ids = to_host(ids.to(torch.int32))
        yield from ()

    def _begin(self, item: Attention | Passage) -> tuple[Fragment, Tensor]:
        """Get the fragment of an item's units, and the input [tokens, hidden size] of its first layer."""
        if item.layer == 0:
            return self._fragments.enter(item.units, item.rows)
        fragment = self._fragments.get(item.units, item.rows)
        return fragment, self._complete_before(item.layer, fragment, item.merges)

    def _complete_before(self, layer: int, fragment: Fragment, merges: Merges) -> Tensor:
        """[tokens, hidden size], input of a layer, after the layer before is completed for the tokens of `merges`."""
        if len(merges) == fragment.num_tokens:
            return self._complete(layer - 1, fragment.rows, merges)  # not stored: the layer's end replaces it
        if len(merges):
            rows = self.arena.index(merges.rows)
            self.arena.write_hidden(rows, self._complete(layer - 1, rows, merges))
        return self.arena.read_hidden(fragment.rows)

    def _complete(self, layer: int, rows: Index, merges: Merges) -> Tensor:
        """[tokens, hidden size], output of a layer. `rows`: those of `merges`."""
        attended, total = self.arena.read_attended(rows, self.arena.index(merges.places))
        arguments = self._fragments.arguments_at(layer, rows) if self._staged.is_replayed(layer) else {}
        return self._staged.complete(layer, attended, total, arguments)

    def _merge(self, item: Merge) -> Pieces:
        rows = self.arena.index(item.merges.rows)
        self.arena.write_hidden(rows, self._complete(item.layer, rows, item.merges))
        yield from ()

    def _pass(self, item: Passage, progress: Progress) -> Pieces:
        fragment, hidden = self._begin(item)
        if self.shape.num_experts:
            shape = (self.shape.num_layers, self.shape.num_experts)
            progress.counts = torch.zeros(shape, dtype=torch.int64, device=self.network.device)
        meter, recorded = self._experts.meter(), self._recorded
        replayed = None if recorded is None else recorded.open(fragment)
        if recorded is not None:
            recorded.counts.zero_()
        passed = yield from self._pass_layers(item, fragment, hidden, progress, meter, replayed)
        if recorded is not None and progress.counts is not None:
            progress.counts += recorded.counts
        if passed is None:
            return
        progress.layer = min(item.until, self.shape.num_layers)
        if item.until > self.shape.num_layers:
            if meter.is_full:
                yield
            if not progress.is_withdrawn:
                self._finish(item.units, fragment, passed, progress)
                return
        self.arena.write_hidden(fragment.rows, passed)

    def _pass_layers(
        self,
        item: Passage,
        fragment: Fragment,
        hidden: Tensor,
        progress: Progress,
        meter: PieceMeter,
        replayed: ReplayedUnits | None,
    ) -> Generator[None, None, Tensor | None]:
        """[tokens, hidden size], output of the last layer; None if stopped, with everything in the arena."""
        for layer in range(item.layer, min(item.until, self.shape.num_layers)):
            progress.layer = layer
            if meter.is_full:
                yield
                meter.restart()
            if progress.is_withdrawn:
                self.arena.write_hidden(fragment.rows, hidden)
                return None
            meter.spend(self.network.layer_bytes[layer], fragment.num_tokens)
            whole = None if replayed is None else replayed.whole(layer, hidden)
            if whole is not None:
                hidden = whole
                if self.shape.is_sparse[layer]:
                    self._take_experts(fragment.num_tokens * self.shape.num_chosen, meter, is_one_call=True)
                continue
            arguments = fragment.arguments(layer)
            attended = self._staged.attend(layer, hidden, arguments, fragment.chosen)
            if attended.inputs is None:
                hidden = attended.hidden
                continue
            total = yield from self._pass_experts(fragment, attended, progress, meter)
            if total is None:
                return None
            hidden = self._staged.complete(layer, attended, total, arguments)
        return hidden

    def _pass_experts(
        self, fragment: Fragment, attended: Attended, progress: Progress, meter: PieceMeter
    ) -> Generator[None, None, Tensor | None]:
        """[tokens, hidden size], weighted sum of the experts; None if stopped, with everything in the arena."""
        ids, weights, inputs = attended.topk_ids, attended.topk_weights, attended.inputs
        assert ids is not None
        assert weights is not None
        assert inputs is not None
        assert progress.counts is not None
        layer, counts = progress.layer, progress.counts[progress.layer]
        if meter.is_full:
            yield
            meter.restart()
        num_pairs, module = ids.numel(), self._experts.module(layer)
        is_one_call = self._experts.is_grouped(layer, inputs)
        num_fitting = self._take_experts(num_pairs, meter, is_one_call=is_one_call)
        if num_fitting == min(self.shape.num_experts, num_pairs) and not progress.is_withdrawn:
            return sum_experts(module, inputs, ids, weights, counts)
        parts = split_experts(module, inputs, ids, weights, counts)
        while not parts.is_over:
            if progress.is_withdrawn:
                self._stand(fragment, attended, parts, progress)
                return None
            parts.advance(num_fitting)
            if not parts.is_over:
                yield
                meter.restart()
                num_fitting = self._take_experts(num_pairs, meter)
        return parts.total()

    def _take_experts(self, num_pairs: int, meter: PieceMeter, *, is_one_call: bool = False) -> int:
        """Count the work of as many experts as fit in the piece, out of those that may have some of the pairs."""
        num_experts = min(self.shape.num_experts, num_pairs)
        return meter.take(self.network.bytes_per_expert, num_pairs, num_experts, is_one_call=is_one_call)

    def _stand(self, fragment: Fragment, attended: Attended, parts: ExpertParts, progress: Progress) -> None:
        """Store a passage that stops among a layer's experts."""
        assert isinstance(progress.item, Passage)
        assert attended.topk_ids is not None
        progress.first_open = parts.first_open
        places = progress.item.places
        ids = self.arena.write_attended(fragment.rows, self.arena.index(places), attended).to(torch.int32)
        progress.topk_ids = to_host(ids)
        token, choice = (ids < parts.first_open).nonzero().cpu().numpy().T
        if len(token):
            # The choices of `ids` are in ascending id, those of the answers in the gate's order.
            order = attended.topk_ids.argsort(dim=1).cpu().numpy()
            pairs = token * ids.shape[1] + order[token, choice]
            answers = parts.answers(upload(pairs, self.network.device))
            self.arena.write_contributions(places[token], choice.astype(np.int32), answers)

    def _sample(self, item: Sample, progress: Progress) -> Pieces:
        fragment = self._fragments.get(item.units, item.rows)
        hidden = self._complete_before(self.shape.num_layers, fragment, item.merges)
        self._finish(item.units, fragment, hidden, progress)
        yield from ()

    def _finish(self, units: Units, fragment: Fragment, hidden: Tensor, progress: Progress) -> None:
        step = fragment.step
        wanted = hidden if len(step.logit_rows) == len(hidden) else hidden[step.upload(step.logit_rows)]
        logits = self._staged.logits(wanted, step)
        progress.result = compute_result(step, logits, progress.counts)
        self._fragments.forget(units)


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


class TorchFrames:
    """Turns vectors of a staged device into bytes and back; implements `wire.hop_frames.TensorFrames`.

    Args:
        device: the device whose vectors are sent and received.

    Attributes:
        dtype: dtype of the vectors by its name in torch, for instance `bfloat16`.
    """

    def __init__(self, device: ExpertTorchDevice) -> None:
        self._hidden_size, self._dtype = device.vector_form
        self.dtype = str(self._dtype).removeprefix("torch.")

    def pack(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a tensor [rows, hidden size], which the caller leaves as they are."""
        return copy_to_host(tensor.contiguous()).view(torch.uint8).numpy().data

    def flatten(self, tensor: Tensor) -> Tensor:
        """Implement `TensorFrames.flatten`."""
        return tensor.contiguous().view(-1).view(torch.uint8)

    def num_bytes(self, num_rows: int) -> int:
        """Implement `TensorFrames.num_bytes`."""
        return num_rows * self._hidden_size * self._dtype.itemsize

    def unpack(self, frame: bytes | memoryview | Tensor, num_rows: int) -> Tensor:
        """Return the tensor [num_rows, hidden size] of some bytes, in host memory or where `frame` is.

        Raises:
            ValueError: the number of bytes is another.
        """
        if len(frame) != self.num_bytes(num_rows):
            raise ValueError(f"{len(frame)} bytes of tensor for {num_rows} rows of {self._hidden_size} {self.dtype}")
        if isinstance(frame, Tensor):
            return frame.view(self._dtype).view(num_rows, self._hidden_size)
        is_writable = isinstance(frame, memoryview) and not frame.readonly
        # Otherwise a copy, because torch takes no memory that it may not write.
        memory = frame if is_writable else bytearray(frame)
        return torch.frombuffer(memory, dtype=self._dtype).view(num_rows, self._hidden_size)


def open_staged_device(
    settings: ModelSettings,
    max_tokens: int,
    on_phase: Callable[[str], None] = lambda _: None,
    local: LocalRank | None = None,
    share: WorkerShare | None = None,
) -> tuple[StagedTorchDevice, ModelInfo]:
    """Open a device that works in stages; otherwise as `open_device`.

    Args:
        settings: `max_parked_bytes` is the memory for the tokens inside the network, taken from the KV cache's. With
            less than two plans take, a plan that passes another may have to wait until the other's layer is complete.
        max_tokens: tokens of one plan.
        local: as for `open_device`. None means alone on the machine, with steps of `max_tokens` tokens.
        share: part of the network to keep, for an attention worker or a colocated one. None means all of it.

    Raises:
        ConfigError: as `open_device`; or the bytes do not hold one plan; or nothing remains for the KV cache.
        UnsupportedModelError: as `open_device`; or the network cannot run in stages.
    """
    local = local or LocalRank(max_tokens=max_tokens)
    checked = open_network(settings, on_phase, local)
    on_phase("pack weights")
    checked.network.pack_linears()
    staged = StagedNetwork(checked.network)  # whose check needs all experts
    if share is not None:
        on_phase("cut weights")
        share.cut(checked.network)
    checked.network.pack_experts()
    num_remote_places = 0 if share is None else share.num_remote_places
    shape, parked_bytes = _choose_shape(checked, staged, max_tokens, settings.max_parked_bytes)
    form = staged.token_form(checked.num_chosen)
    shape = replace(shape, num_remote_places=num_remote_places)
    parked_bytes += num_remote_places * form.remote_place_bytes
    on_phase("allocate KV cache")
    graphs = _plan_graphs(checked) if local.records_steps and not settings.enforce_eager else None
    checked.network.graph_bytes = 0 if graphs is None else graphs.num_bytes
    pools, info = checked.allocate(settings, parked_bytes)
    device = StagedTorchDevice(staged, pools, shape)
    if graphs is not None:
        on_phase("record graphs")
        device.replay(graphs.record(staged, pools))
    on_phase("ready")
    return device, info


def _choose_shape(
    checked: CheckedNetwork, staged: StagedNetwork, max_tokens: int, max_parked_bytes: int | None
) -> tuple[StageShape, int]:
    """Choose as many places as the bytes hold, and compute the bytes of rows and places together."""
    network = checked.network
    form = staged.token_form(checked.num_chosen)
    row_bytes, place_bytes = form.row_bytes, form.place_bytes
    num_rows = NUM_PLANS * max_tokens
    num_places = num_rows
    least = num_rows * row_bytes + max_tokens * place_bytes
    if max_parked_bytes is not None:
        if max_parked_bytes < least:
            raise ConfigError(
                f"--max-parked-bytes {max_parked_bytes} does not hold one step of {max_tokens} tokens: give at least"
                f" {least}, or lower --max-num-batched-tokens."
            )
        if place_bytes:
            num_places = min(num_places, (max_parked_bytes - num_rows * row_bytes) // place_bytes)
    shape = StageShape(
        is_sparse=staged.is_sparse,
        num_experts=network.num_slots,
        num_chosen=checked.num_chosen,
        num_rows=num_rows,
        num_places=num_places,
    )
    return shape, num_rows * row_bytes + num_places * place_bytes


def _plan_graphs(checked: CheckedNetwork) -> Any:
    """Plan the graphs of the network's layers; None for a network that has none, among them all on a CPU."""
    if checked.network.device.type == "cpu" or checked.network.exchange is None:
        return None
    from moestro.model.cuda.layer_graphs import plan_layer_graphs  # noqa: PLC0415 - it imports Triton

    local, max_model_len, block_size = checked.local, checked.facts.max_model_len, checked.probe.block_size
    return plan_layer_graphs(checked.network, local.max_seqs, max_model_len, block_size, max_tokens=local.max_tokens)
