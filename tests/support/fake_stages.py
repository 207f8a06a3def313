"""A device that works in stages, over integers: its "network" is a hash, so that nothing lost goes unnoticed.

A token's state is a 64-bit number. Attention of a layer stores it in that layer's paged KV and reads back everything
before it; experts add contributions that depend on expert, layer and token; each must come exactly once. The next token
is what is left at the end, and `expected_tokens` knows it without blocks, batches or stages.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
from support.fake_device import copy_blocks

from moestro.core.rng import mix64
from moestro.core.stages import (
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Merge,
    Merged,
    Merges,
    Passage,
    Sample,
    StageShape,
    Stopped,
)
from moestro.core.work import LOGITS_LAST, StepResult

VOCAB = 50
U64 = np.uint64


def _attend(states: np.ndarray, layer: int) -> np.ndarray:
    """What the last of `states` makes of all of them; their order matters."""
    keyed = mix64(states ^ mix64(np.arange(len(states), dtype=U64) + U64(1000 * layer)))
    return mix64(keyed.cumsum(dtype=U64))


def _gate(attended: np.ndarray, num_experts: int, num_chosen: int) -> np.ndarray:
    """int32[tokens, chosen], ascending; skewed, so that some experts get none."""
    scores = mix64(attended[:, None] + np.arange(num_experts, dtype=U64)) >> np.arange(num_experts, dtype=U64)
    return np.sort(np.argsort(scores, axis=1, kind="stable")[:, :num_chosen], axis=1).astype(np.int32)


def _expert(attended: np.ndarray, experts: np.ndarray, layer: int) -> np.ndarray:
    return mix64(attended ^ (experts.astype(U64) * U64(7919) + U64(layer)))


def _combine(contributions: np.ndarray) -> np.ndarray:
    """[tokens, chosen] in ascending expert id; their order matters."""
    total = np.zeros(len(contributions), U64)
    for k in range(contributions.shape[1]):
        total = mix64(total ^ contributions[:, k])
    return total


def expected_tokens(request, shape: StageShape) -> list[int]:
    tokens = request.token_array().tolist()
    for _ in range(request.sampling.max_tokens):
        states = np.array(tokens, U64)
        for layer, sparse in enumerate(shape.is_sparse):
            attended = _attend(states, layer)
            states = attended
            if sparse:
                ids = _gate(attended, shape.num_experts, shape.num_chosen)
                states = attended + _combine(_expert(attended[:, None], ids, layer))
        tokens.append(int(states[-1] % U64(VOCAB)))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


def make_shape(num_rows: int, num_places: int | None = None, *, num_chosen: int = 3, dense: int = 1) -> StageShape:
    is_sparse = tuple(layer != dense for layer in range(4))
    return StageShape(
        is_sparse=is_sparse, num_experts=6, num_chosen=num_chosen, num_rows=num_rows, num_places=num_places or num_rows
    )


class FakeStages:
    """Works a piece a poll, or in the background: then a piece takes `piece_ns`, by the clock that the rank passes.

    Attributes:
        log: (what, layer, serials) of every piece, in order.
        may_forget: units may be recalled, which leave contributions outstanding.
        executed: contributions by (serial, position, layer, expert).
    """

    def __init__(
        self,
        shape: StageShape,
        num_blocks: int,
        block_size: int,
        piece_ns: int | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.shape, self.piece_ns = shape, piece_ns
        self.counts_shape = (shape.num_layers, shape.num_experts)
        self.kv = np.zeros((shape.num_layers, num_blocks, block_size), U64)
        self.host = np.zeros((shape.num_layers, num_host_blocks, block_size), U64)
        self.state = np.zeros(shape.num_rows, U64)
        num_places = shape.num_places + shape.num_remote_places
        self.attended = np.zeros(num_places, U64)
        self.chosen = np.zeros((num_places, shape.num_chosen), np.int32)
        self.contributions = np.zeros((num_places, shape.num_chosen), U64)
        self.is_there = np.ones((num_places, shape.num_chosen), bool)
        self.owner: list = [None] * num_places
        self.merged = np.ones(num_places, bool)
        self.num_logical = shape.num_experts  # experts among which the gate chooses
        self.logical_of = np.tile(np.arange(shape.num_experts), (shape.num_layers, 1))  # by layer and slot
        self.may_forget = False
        self.log: list = []
        self.executed: dict = {}
        self._items: deque = deque()
        self._busy_until_ns = 0

    @property
    def works_when_polled(self) -> bool:
        return self.piece_ns is None

    def launch(self, item, now_ns: int) -> None:
        num_pieces = 1
        if isinstance(item, Experts):
            num_pieces = len(item.experts)
        elif isinstance(item, Passage):
            num_pieces = len(self._passage_pieces(item))
        start = max(now_ns, self._busy_until_ns)
        self._items.append([item, 0, num_pieces, start, np.zeros(self.counts_shape, np.int64)])
        self._busy_until_ns = start + num_pieces * (self.piece_ns or 0)

    def move_blocks(self, moves, now_ns: int) -> None:
        copy_blocks(moves, self.kv, self.host, axis=1)

    def withdraw(self, now_ns: int) -> None:
        start = None
        for entry in self._items:
            item, done, num_pieces, started_ns, _ = entry
            begun = done
            if self.piece_ns:
                started_ns = entry[3] = started_ns if start is None else start
                begun = min(max(-(-(now_ns - started_ns) // self.piece_ns), 0), num_pieces)
            if isinstance(item, Experts | Passage):
                entry[2] = begun
            start = started_ns + entry[2] * (self.piece_ns or 0)
        self._busy_until_ns = start or 0

    def ready_at_ns(self) -> int | None:
        if self.piece_ns is None or not self._items:
            return None
        _, _, num_pieces, start, _ = self._items[0]
        return start + num_pieces * self.piece_ns

    def poll(self, now_ns: int) -> list:
        results: list = []
        if self.piece_ns is not None:
            while self._items and self.ready_at_ns() <= now_ns:
                while (result := self._work(self._items[0])) is None:
                    pass
                self._items.popleft()
                results.append(result)
        elif self._items and (result := self._work(self._items[0])) is not None:
            self._items.popleft()
            results.append(result)
        return results

    def _work(self, entry):
        """One piece; the item's result when it was the last."""
        item, done, num_pieces, _, _ = entry
        match item:
            case Attention():
                return self._attention(item)
            case Sample():
                return self._sample(item)
            case Passage():
                return self._pass(entry)
            case Merge():
                self.log.append(("merge", item.layer, []))
                self._merge(item.merges, item.layer)
                return Merged()
        if done < num_pieces:
            self._batch(item, done)
            entry[1] += 1
        if entry[1] < num_pieces:
            return None
        return ExpertsDone(num_pieces)

    def _merge(self, merges: Merges, layer: int) -> None:
        """End `layer` for tokens that have all contributions of its experts."""
        if len(merges):
            assert all(self.owner[place][2] == layer for place in merges.places.tolist()), "another layer's places"
            assert self.is_there[merges.places].all(), "a layer is complete without all contributions"
            total = _combine(self.contributions[merges.places])
            self.state[merges.rows] = self.attended[merges.places] + total
            self.merged[merges.places] = True

    def read_inputs(self, places):
        return self.attended[places]

    def store_inputs(self, places, inputs) -> None:
        assert (places >= self.shape.num_places).all()
        self.attended[places] = inputs
        self.is_there[places] = False

    def read_contributions(self, places, choices):
        assert self.is_there[places, choices].all()
        return self.contributions[places, choices]

    def store_contributions(self, places, choices, contributions) -> None:
        assert (places < self.shape.num_places).all()
        assert not self.is_there[places, choices].any(), "a contribution came twice"
        for place, choice in zip(places.tolist(), choices.tolist(), strict=True):
            self._count_executed(place, int(self.chosen[place, choice]))
        self.contributions[places, choices] = contributions
        self.is_there[places, choices] = True

    def _count_executed(self, place: int, expert: int) -> None:
        key = (*self.owner[place], expert)
        self.executed[key] = self.executed.get(key, 0) + 1

    def _attention(self, item: Attention) -> AttentionDone:
        self._merge(item.merges, item.layer - 1)
        units, size = item.units, self.kv.shape[2]
        self.log.append(("attention", item.layer, units.serial.tolist()))
        ends = np.cumsum(units.num_tokens)
        attended = np.empty(len(item.rows), U64)
        for i in range(len(units)):
            rows = item.rows[ends[i] - units.num_tokens[i] : ends[i]]
            if item.layer == 0:
                self.state[rows] = units.token_ids[ends[i] - units.num_tokens[i] : ends[i]].astype(U64)
            positions = units.start[i] + np.arange(units.num_tokens[i])
            written = positions >= units.write_start[i]
            blocks = units.block_tables[i, positions // size]
            self.kv[item.layer, blocks[written], (positions % size)[written]] = self.state[rows][written]
        for i in range(len(units)):
            end = int(units.start[i] + units.num_tokens[i])
            states = self.kv[item.layer, units.block_tables[i]].reshape(-1)[:end].copy()
            attended[ends[i] - units.num_tokens[i] : ends[i]] = _attend(states, item.layer)[units.start[i] :]
        if not self.shape.is_sparse[item.layer]:
            self.state[item.rows] = attended
            return AttentionDone(None)
        assert self.may_forget or self.merged[item.places].all(), "a place is given away before its layer has ended"
        assert len(set(item.places.tolist())) == len(item.rows) == len(item.places)
        self.attended[item.places] = attended
        self.chosen[item.places] = _gate(attended, self.num_logical, self.shape.num_chosen)
        self.is_there[item.places] = self.merged[item.places] = False
        serial = np.repeat(units.serial, units.num_tokens)
        position = np.concatenate([s + np.arange(n) for s, n in zip(units.start, units.num_tokens, strict=True)])
        for place, *owner in zip(item.places.tolist(), serial.tolist(), position.tolist(), strict=True):
            self.owner[place] = (*owner, item.layer)
        return AttentionDone(self.chosen[item.places])

    def _passage_pieces(self, item: Passage) -> list:
        """(layer, what): None: its attention; an expert."""
        pieces: list = []
        for layer in range(item.layer, min(item.until, self.shape.num_layers)):
            experts = range(self.shape.num_experts) if self.shape.is_sparse[layer] else ()
            pieces += [(layer, None), *((layer, expert) for expert in experts)]
        return pieces + [(self.shape.num_layers, None)] * (item.until > self.shape.num_layers)

    def _pass(self, entry):
        """One piece of a passage, made of the other items; its result at the end, or where it was withdrawn."""
        item, done, num_pieces, _, counts = entry
        pieces = self._passage_pieces(item)
        if done < num_pieces:
            layer, expert = pieces[done]
            entry[1] += 1
            merges = self._merges_within(item, layer)
            if layer == self.shape.num_layers:
                result = self._sample(Sample(item.units, item.rows, merges))
                return msgspec.structs.replace(result, expert_counts=counts)
            if expert is None:
                self._attention(Attention(layer, item.units, item.rows, item.places, merges))
            else:
                self._pass_expert(item, layer, expert, counts)
        if entry[1] < num_pieces:
            return None
        layer, expert = pieces[num_pieces] if num_pieces < len(pieces) else (item.until, None)
        if expert is None:
            self._merge(self._merges_within(item, layer), layer - 1)
            return Stopped(layer, None, 0, counts)
        return Stopped(layer, self.chosen[item.places], expert, counts)

    def _merges_within(self, item: Passage, layer: int) -> Merges:
        """Tokens whose layer before `layer` has not ended: as they came, or all within a passage of sparse layers."""
        if layer == item.layer:
            return item.merges
        if self.shape.is_sparse[layer - 1]:
            return Merges(item.rows, item.places)
        return Merges(item.rows[:0], item.places[:0])

    def _pass_expert(self, item: Passage, layer: int, expert: int, counts: np.ndarray) -> None:
        token, choice = np.nonzero(self.chosen[item.places] == expert)
        counts[layer, expert] += len(token)
        one = np.array([expert], np.int32), np.array([len(token)], np.int32)
        if len(token):
            self._batch(Experts(layer, *one, item.places[token], choice), 0)

    def _batch(self, item: Experts, which: int) -> None:
        begin = int(item.counts[:which].sum())
        places = item.places[begin : begin + item.counts[which]]
        choices = item.choices[begin : begin + item.counts[which]]
        expert = int(self.logical_of[item.layer, item.experts[which]])
        own = places < self.shape.num_places
        self.log.append(("expert", item.layer, sorted({self.owner[place][0] for place in places[own].tolist()})))
        assert (self.chosen[places, choices] == expert)[own].all(), "a token visits an expert its gate did not choose"
        assert not self.is_there[places, choices].any(), "a contribution came twice"
        for place in places[own].tolist():
            self._count_executed(place, expert)
        self.contributions[places, choices] = _expert(self.attended[places], np.full(len(places), expert), item.layer)
        self.is_there[places, choices] = True

    def _sample(self, item: Sample) -> StepResult:
        units = item.units
        self._merge(item.merges, self.shape.num_layers - 1)
        self.log.append(("sample", self.shape.num_layers, units.serial.tolist()))
        last = item.rows[np.cumsum(units.num_tokens) - 1]
        tokens = (self.state[last] % U64(VOCAB)).astype(np.int32)
        return StepResult(units.slot, np.where(units.logits & LOGITS_LAST, tokens, -1).astype(np.int32))
