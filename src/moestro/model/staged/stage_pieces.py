"""Stage items as pieces: the device can stop between any two of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moestro.core.stages import Attention, Experts, Merge, Merges, Passage, Sample, StageShape
from moestro.core.work import Units
from moestro.model.experts.expert_parts import ExpertParts, split_experts
from moestro.model.experts.expert_pieces import ExpertRunner, PieceMeter, Pieces, Progress
from moestro.model.experts.routed import sum_experts
from moestro.model.pools import KVPools
from moestro.model.results import compute_result, to_host
from moestro.model.staged.arena import Index
from moestro.model.staged.fragments import Fragment, Fragments
from moestro.model.staged.layer_stages import Attended
from moestro.model.staged.staged_network import StagedNetwork
from moestro.model.upload import upload


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
