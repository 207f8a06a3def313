"""Drives a device that works in stages, with units in new random fragments at every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from support.torch_stages import finish, make_merges

from moestro.core.stages import (
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    Merge,
    Merged,
    Passage,
    Sample,
    Stopped,
)
from moestro.core.work import StepResult, Units, select_units
from moestro.flow.token_pool import UnitColumns
from moestro.model.staged.staged_device import StagedTorchDevice

NONE = np.empty(0, np.int32)


@dataclass(eq=False)
class Unit:
    """One unit in the network.

    `pairs` int64[n, 3] are its open (place, choice, expert). A unit with places and no open pair waits for the
    attention of `layer`, which merges. The first row is the unit's number.
    """

    slot: int
    rows: np.ndarray
    layer: int = 0
    places: np.ndarray = field(default_factory=lambda: NONE)
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))

    @property
    def number(self) -> int:
        return int(self.rows[0])


class FragmentDriver:
    """Runs waves of units to their results. Everything is drawn: who runs with whom, where, and what is withdrawn.

    Attributes:
        seen: number of items of each kind, of merges of some tokens alone, and of passages stopped among experts.
    """

    def __init__(self, device: StagedTorchDevice, rng: np.random.Generator, *, withdraws: bool = True) -> None:
        self.device, self.rng, self.withdraws = device, rng, withdraws
        self.inside: list[Unit] = []
        self.columns = UnitColumns(device.shape.num_rows)
        self.free_rows = rng.permutation(device.shape.num_rows).astype(np.int32)
        self.free_places = rng.permutation(device.shape.num_places).astype(np.int32)
        self.results: dict[int, StepResult] = {}
        self.counts = np.zeros((device.shape.num_layers, max(device.shape.num_experts, 1)), np.int64)
        self.seen = dict.fromkeys(
            ("Attention", "Experts", "Merge", "Passage", "Sample", "some merged", "among experts", "withdrawn"), 0
        )

    def run(self, waves: list[Units]) -> dict[int, StepResult]:
        """{slot: the unit's own result}."""
        waiting = list(waves)
        self.results = {}
        while waiting or self.inside:
            if waiting and (not self.inside or self.rng.random() < 0.3):
                self._enter(waiting.pop(0))
            elif any(len(unit.pairs) for unit in self.inside) and self.rng.random() < 0.6:
                self._run_experts()
            else:
                self._attend()
        return self.results

    def _enter(self, wave: Units) -> None:
        for index in range(len(wave)):
            rows, self.free_rows = np.split(self.free_rows, [wave.num_tokens[index]])
            assert len(rows) == wave.num_tokens[index]
            rows = np.sort(rows) if self.rng.random() < 0.5 else rows
            self.columns.put(rows[:1].astype(np.int64), rows, select_units(wave, np.array([index])))
            self.inside.append(Unit(int(wave.slot[index]), rows))

    def _attend(self) -> None:
        ready = [unit for unit in self.inside if not len(unit.pairs)]
        if not ready:
            return None
        layer = int(self.rng.choice([unit.layer for unit in ready]))
        ready = [unit for unit in ready if unit.layer == layer]
        num = len(ready) if self.rng.random() < 0.5 else self.rng.integers(1, len(ready) + 1)
        chosen = [ready[i] for i in self.rng.permutation(len(ready))[:num]]
        rows = np.concatenate([unit.rows for unit in chosen])
        units = self.columns.gather(np.array([unit.number for unit in chosen]), rows)
        if len(chosen) > 1 and self.rng.random() < 0.5:
            self._merge_alone([unit for unit in chosen if len(unit.places)])
        merges = make_merges([(unit.rows, unit.places) for unit in chosen if len(unit.places)])
        self.seen["some merged"] += 0 < len(merges) < len(rows)
        shape = self.device.shape
        if layer == shape.num_layers:
            self._free(merges.places)
            return self._take(chosen, Sample(units, rows, merges))
        passes = self.rng.random() < 0.4
        needs_places = shape.num_experts > 0 if passes else shape.is_sparse[layer]
        places = self._take_places(len(rows) if needs_places else 0, merges.places)
        if passes:
            until = min(layer + int(self.rng.geometric(0.5)), shape.num_layers + 1)
            return self._take(chosen, Passage(layer, until, units, rows, places, merges))
        return self._take(chosen, Attention(layer, units, rows, places, merges))

    def _merge_alone(self, units: list[Unit]) -> None:
        for unit in units[: self.rng.integers(len(units) + 1)]:
            assert isinstance(self._do(Merge(unit.layer - 1, make_merges([(unit.rows, unit.places)]))), Merged)
            self._free(unit.places)
            unit.places = NONE

    def _take_places(self, num: int, merged: np.ndarray) -> np.ndarray:
        """New places, which may be merged ones; all others that were merged are free."""
        free = self.rng.permutation(np.concatenate([self.free_places, merged]))
        assert len(free) >= num
        places, self.free_places = np.split(free, [num])
        self._poison(np.setdiff1d(self.free_places, merged))
        return places

    def _free(self, places: np.ndarray) -> None:
        self.free_places = np.concatenate([self.free_places, places])

    def _poison(self, places: np.ndarray) -> None:
        """Old contributions of free places must never be read."""
        num_chosen = self.device.shape.num_chosen
        if len(places) and num_chosen:
            at, choices = np.repeat(places, num_chosen), np.tile(np.arange(num_chosen, dtype=np.int32), len(places))
            old = self.device.read_contributions(at, choices)
            self.device.store_contributions(at, choices, old * float("nan"))

    def _take(self, chosen: list[Unit], item: Attention | Passage | Sample) -> None:
        result = self._do(item)
        bounds = np.cumsum([len(unit.rows) for unit in chosen])[:-1]
        match result:
            case AttentionDone(topk_ids):
                self._stand(chosen, item.layer, np.split(item.places, bounds), topk_ids, 0)
            case Stopped(layer, None):
                self._free(item.places)
                for unit in chosen:
                    unit.layer, unit.places = layer, NONE
            case Stopped(layer, topk_ids, first_open):
                self.seen["among experts"] += 1
                self._stand(chosen, layer, np.split(item.places, bounds), topk_ids, first_open)
            case StepResult():
                if isinstance(item, Passage):
                    self._free(item.places)
                self._leave(chosen, result)
        if isinstance(result, Stopped | StepResult) and result.expert_counts is not None:
            self.counts += result.expert_counts

    def _stand(self, chosen: list[Unit], layer: int, places: list, topk_ids, first_open: int) -> None:
        end = 0
        for unit, own in zip(chosen, places, strict=True):
            unit.places, unit.layer = own, layer + (topk_ids is None)
            if topk_ids is None:
                continue
            ids, end = topk_ids[end : end + len(own)], end + len(own)
            choices = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            pairs = np.stack([np.broadcast_to(own[:, None], ids.shape), choices, ids], axis=2).reshape(-1, 3)
            self._keep(unit, pairs[pairs[:, 2] >= first_open])

    def _keep(self, unit: Unit, pairs: np.ndarray) -> None:
        """Leave these pairs open; without any, the unit waits for the next layer."""
        unit.pairs = pairs
        unit.layer += not len(pairs)

    def _leave(self, chosen: list[Unit], result: StepResult) -> None:
        for index, unit in enumerate(chosen):
            self.results[unit.slot] = result.select(np.array([index]))
            self.free_rows = np.concatenate([self.free_rows, unit.rows])
            self.columns.forget(np.array([unit.number]))
            self.inside.remove(unit)

    def _run_experts(self) -> None:
        among = [unit for unit in self.inside if len(unit.pairs)]
        layer = int(self.rng.choice([unit.layer for unit in among]))
        among = [unit for unit in among if unit.layer == layer]
        pairs = self.rng.permutation(np.concatenate([unit.pairs for unit in among]))
        pairs = pairs[: self.rng.integers(1, len(pairs) + 1)]
        order = self.rng.permutation(np.unique(pairs[:, 2]))
        batches = [pairs[pairs[:, 2] == expert] for expert in order]
        counts = np.array([len(batch) for batch in batches], np.int32)
        places, choices = np.concatenate(batches)[:, :2].T.astype(np.int32)
        result = self._do(Experts(layer, order.astype(np.int32), counts, places, choices))
        assert isinstance(result, ExpertsDone)
        done = np.concatenate([*batches[: result.num_batches], np.empty((0, 3), np.int64)])
        self.counts[layer, order[: result.num_batches]] += counts[: result.num_batches]
        keys = {tuple(pair) for pair in done[:, :2].tolist()}
        for unit in among:
            open_ = [tuple(pair) not in keys for pair in unit.pairs[:, :2].tolist()]
            self._keep(unit, unit.pairs[open_])

    def _do(self, item):
        self.seen[type(item).__name__] += 1
        patience = int(self.rng.integers(0, 4)) if self.withdraws and self.rng.random() < 0.4 else None
        self.seen["withdrawn"] += patience is not None
        return finish(self.device, item, patience)
