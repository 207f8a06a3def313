"""Stage items as pieces: the device can stop between any two of them."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from moestro.core.stages import Attention, Experts, Merge, Merges, Passage, Sample, StageShape
from moestro.core.work import Units
from moestro.model.arena import Index
from moestro.model.expert_pieces import ExpertRunner, Pieces, Progress
from moestro.model.experts import combine
from moestro.model.fragments import Fragment, Fragments
from moestro.model.layer_stages import Attended
from moestro.model.pools import KVPools
from moestro.model.results import compute_result, to_host
from moestro.model.staged_network import StagedNetwork

_FEW_TOKENS = 64


class StageRunner:
    """Runs items on a network, piece by piece.

    Args:
        staged: the network.
        pools: its KV cache.
        shape: numbers of rows and places for tokens inside the network.
        piece_bytes: weight bytes below which several experts form one piece.

    Attributes:
        network: the network.
        shape: as above.
        arena: memory of the tokens inside the network.
    """

    def __init__(self, staged: StagedNetwork, pools: KVPools, shape: StageShape, piece_bytes: int) -> None:
        self._staged, self.network, self.shape = staged, staged.network, shape
        self._experts = ExpertRunner(staged.network, staged.token_form(shape.num_chosen), shape, piece_bytes)
        self.arena = self._experts.arena
        self._fragments = Fragments(staged, pools, self.arena)

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
        num_layers = self.shape.num_layers
        fragment, hidden = self._begin(item)
        # Where looking up costs more than the work itself, an attention and its experts are one piece.
        most_experts = min(self.shape.num_experts, len(item.rows) * self.shape.num_chosen)
        is_small = len(item.rows) <= _FEW_TOKENS and self._experts.num_a_piece >= most_experts
        if self.shape.num_experts:
            shape = (num_layers, self.shape.num_experts)
            progress.counts = torch.zeros(shape, dtype=torch.int64, device=self.network.device)
        for layer in range(item.layer, min(item.until, num_layers)):
            progress.layer = layer
            if layer > item.layer:
                yield
            if progress.is_withdrawn:
                self.arena.write_hidden(fragment.rows, hidden)
                return
            arguments = fragment.arguments(layer)
            attended = self._staged.attend(layer, hidden, arguments, fragment.chosen)
            if attended.inputs is None:
                hidden = attended.hidden
                continue
            if not is_small:
                yield
            total = yield from self._pass_experts(fragment, attended, progress)
            if total is None:
                return
            hidden = self._staged.complete(layer, attended, total, arguments)
        progress.layer = min(item.until, num_layers)
        if item.until > num_layers:
            yield
            if not progress.is_withdrawn:
                self._finish(item.units, fragment, hidden, progress)
                return
        self.arena.write_hidden(fragment.rows, hidden)

    def _pass_experts(
        self, fragment: Fragment, attended: Attended, progress: Progress
    ) -> Generator[None, None, Tensor | None]:
        """[tokens, hidden size], weighted sum of the experts; None if stopped, with everything in the arena."""
        ids, weights, inputs = attended.topk_ids, attended.topk_weights, attended.inputs
        assert ids is not None
        assert weights is not None
        assert inputs is not None
        assert progress.counts is not None
        by_expert = ids.reshape(-1).argsort(stable=True)
        counts = progress.counts[progress.layer]
        counts.scatter_add_(0, ids.reshape(-1), torch.ones_like(by_expert))
        rows = inputs.index_select(0, by_expert // ids.shape[1])
        whole = self._experts.run_whole(progress.layer, rows, counts)
        if whole is not None:  # the host does not read the tokens' experts, so the accelerator never waits
            return combine(whole, by_expert, weights)
        done, end = torch.empty_like(rows), 0
        present = [(expert, count) for expert, count in enumerate(counts.tolist()) if count]
        for batch in self._experts.split(progress.layer, rows, present):
            if end:
                yield
            if progress.is_withdrawn:
                progress.first_open = batch[0][0]
                counts[progress.first_open :] = 0
                self._stand(fragment, attended, done[:end], progress)
                return None
            end = self._experts.run_batch(progress.layer, rows, done, end, batch)
        return combine(done, by_expert, weights)

    def _stand(self, fragment: Fragment, attended: Attended, done: Tensor, progress: Progress) -> None:
        """Store a passage that stops among a layer's experts. `done`: answers of the pairs with the lowest experts."""
        assert isinstance(progress.item, Passage)
        places = progress.item.places
        ids = self.arena.write_attended(fragment.rows, self.arena.index(places), attended).to(torch.int32)
        progress.topk_ids = to_host(ids)
        if len(done):
            # The rows are ordered by expert and then by token, whatever the order of a token's choices was.
            pairs = ids.reshape(-1).argsort(stable=True)[: len(done)].cpu().numpy()
            token, choice = np.divmod(pairs, ids.shape[1])
            self.arena.write_contributions(places[token], choice.astype(np.int32), done)

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
