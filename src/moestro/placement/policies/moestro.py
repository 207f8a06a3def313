"""Moestro's own placement policy: few moves, shares of copies, near copies, and no change that does not pay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.expert_table import EMPTY, ExpertTable
from moestro.errors import ConfigError
from moestro.placement.budget import Allowance, LayerOffers, allowance_of, layers_that_pay
from moestro.placement.copies import Packing, even_shares, normal_shares, packing_of
from moestro.placement.problem import PlaceProblem, problem_of
from moestro.placement.registry import PLACE_POLICIES, PlaceView
from moestro.placement.replicas import restore
from moestro.placement.score import score
from moestro.placement.search import SHARE_STEPS, SearchLimits, improve, is_level, is_small, start_anew
from moestro.placement.traffic import Floats

# After a death, service comes before the last percent: fewer copies move, and the next change levels the rest.
URGENT_TARGET, URGENT_STEPS = 0.94, 5
# A layer with a lower mean load over largest load is only placed anew: exchanges would move as much and take longer.
FAR_OFF = 0.7
# A layer that misses the target by more is also placed anew; for less, it would move most of its copies.
MISSED_BY = 0.01


@PLACE_POLICIES.register(
    "moestro",
    "levels load by shares of copies and few moves, brings copies near their tokens, and changes nothing that does "
    "not pay",
    source="Moestro; replica counts and packing after EPLB (DeepSeek), swaps after SwiftBalance (vllm-ascend), "
    "risk after FlashLB (vllm-ascend)",
)
@dataclass(frozen=True, slots=True)
class MoestroPlacement:
    """Plans by the traffic model of `placement.score`, all terms in seconds.

    The search starts from the present table and moves no more than its target takes. Layers that miss the target are
    also placed anew. Each layer takes what is best for it; layers whose savings pay for their move are changed, and
    the limits of the view are never exceeded, except that experts without a live copy are always placed.
    Groups of experts (`num_groups`) are ignored: they bound which experts a token takes, not where these live.

    Attributes:
        target: Mean load over largest load at which a layer is left alone: fewer moves below 1.
        slack: Part of its load that a device may have more so that rows travel less.
        hysteresis: Part by which savings over the horizon must exceed the seconds of the move.
        risk: Standard deviations of an expert's tokens that are added to their mean.
        weighted: 1 for shares of copies, 0 for equal parts.
        rounds: Rounds of exchanges for balance.
        turns: Rotations of pairs of devices for nearness.

    Raises:
        ConfigError: A setting is out of range.
    """

    target: float = 0.999
    slack: float = 0.01
    hysteresis: float = 0.1
    risk: float = 0.0
    weighted: int = 1
    rounds: int = 12
    turns: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ConfigError(f"target must be above 0 and at most 1, got {self.target:g}")
        for name in ("slack", "hysteresis", "risk", "rounds", "turns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name):g}")

    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return the next placement, or the present one where no change pays.

        Raises:
            ValueError: The live devices have fewer slots than there are experts.
        """
        problem = problem_of(view, self.risk)
        if int(problem.room.sum()) < problem.shape[1]:
            raise ValueError(
                f"{problem.shape[1]} experts do not fit into the {int(problem.room.sum())} slots of the live devices"
            )
        allowance = allowance_of(view.limits, view.prices.expert_bytes, len(problem.speed))
        base = _present(view, problem)
        restored = restore(problem, base, allowance)
        limits = SearchLimits(self.target, self.slack, self.rounds, self.turns, SHARE_STEPS if self.weighted else 0)
        plan = _Plan(view, problem, base, self.hysteresis)
        if len(restored):
            urgent = replace(
                limits,
                target=min(self.target, URGENT_TARGET),
                num_share_steps=min(URGENT_STEPS, limits.num_share_steps),
                num_turns=0,
            )
            return plan.urgent(urgent, allowance, restored)
        return plan.best(limits, allowance)


# Per layer: seconds of work and of rows; and by device: copies that it receives, and their seconds.
_Priced = tuple[Floats, Floats, NDArray[np.int64], Floats]


def _present(view: PlaceView, problem: PlaceProblem) -> Packing:
    """Return the present placement on the live devices."""
    live = np.flatnonzero(view.devices.is_alive)
    num_experts = problem.shape[1]
    expert = view.table.logical_of[live].swapaxes(0, 1).astype(np.int64)
    expert[~np.broadcast_to(problem.room, expert.shape)] = EMPTY
    if view.table.shares is None:
        return packing_of(problem, expert, even_shares(expert, num_experts))
    share = normal_shares(expert, view.table.shares[live].swapaxes(0, 1), num_experts)
    return packing_of(problem, expert, share)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """One plan of the policy.

    Attributes:
        view, problem: What is planned.
        base: The present placement, with all experts covered; what is not changed stays so.
        hysteresis: Part by which savings must exceed the seconds of the move.
    """

    view: PlaceView
    problem: PlaceProblem
    base: Packing
    hysteresis: float

    def urgent(self, limits: SearchLimits, allowance: Allowance, restored: NDArray[np.intp]) -> ExpertTable:
        """Return the base, leveled by few moves where that makes the slowest device faster; no gate, for it is due."""
        before = self.problem.load(self.base.work).max(axis=1)
        layers = self._layers_to_change(restored)
        plan = self._improved(layers, limits, allowance)
        better = np.flatnonzero(self.problem.load(plan.work).max(axis=1) < before)
        self.base.put(better, plan.of_layers(better))
        return self._table(self.base)

    def best(self, limits: SearchLimits, allowance: Allowance) -> ExpertTable:
        """Return the best table within the limits."""
        left = Allowance(allowance.total, allowance.each.copy())
        base, layers = self._priced(self.base), self._layers_to_change(np.zeros(0, np.intp))
        near = layers if allowance.is_limited else layers[is_level(self.problem, self.base, FAR_OFF)[layers]]
        plan = self._improved(near, limits, allowance)
        offers = self._offers(plan, base)
        chosen, net = self._pay(offers, left)
        missed = layers[~is_level(self.problem, plan, limits.target - MISSED_BY)[layers]]
        if is_small(self.problem):
            missed = layers
        if len(missed):
            other, other_offers = self._anew(plan, offers, base, missed, limits)
            other_chosen, other_net = self._pay(other_offers, left)
            if other_net > net:
                plan, chosen = other, other_chosen
        if not len(chosen) and (self.view.table.is_alive == self.view.devices.is_alive).all():
            return self.view.table
        final = self.base.of_layers(np.arange(self.problem.shape[0]))
        final.put(chosen, plan.of_layers(chosen))
        return self._table(final)

    def _improved(self, layers: NDArray[np.intp], limits: SearchLimits, allowance: Allowance) -> Packing:
        """Return the base with some layers improved."""
        plan = self.base.of_layers(np.arange(self.problem.shape[0]))
        if len(layers):
            warm = self.base.of_layers(layers)
            improve(self.problem.of_layers(layers), warm, limits, allowance)
            plan.put(layers, warm)
        return plan

    def _anew(
        self, plan: Packing, offers: LayerOffers, base: _Priced, layers: NDArray[np.intp], limits: SearchLimits
    ) -> tuple[Packing, LayerOffers]:
        """Return the plan with those layers placed anew that gain by it.

        A start counts only if it is as level as the best one, but for the slack.
        """
        best = plan.of_layers(np.arange(self.problem.shape[0]))
        starts = []
        for start in start_anew(self.problem.of_layers(layers), limits):
            anew = plan.of_layers(np.arange(self.problem.shape[0]))
            anew.put(layers, start)
            starts.append((anew, self._offers(anew, base)))
        least_s = np.min([each.compute_s for _, each in starts], axis=0) * (1 + limits.slack)
        for anew, priced in starts:
            ok = (priced.compute_s <= least_s * (1 + 1e-9)) & (self._net(priced) > self._net(offers))
            best.put(np.flatnonzero(ok), anew.of_layers(np.flatnonzero(ok)))
            offers = offers.with_layers(ok, priced)
        return best, offers

    def _layers_to_change(self, changed: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the layers that may change: those that did already, then those with the most to gain."""
        num_layers = self.problem.shape[0]
        most = self.view.limits.max_layers
        if most is None or most >= num_layers:
            return np.arange(num_layers)
        work = self.base.work
        excess = self.problem.load(work).max(axis=1) - self.problem.even_load(work)
        excess[changed] = np.inf
        return np.sort(np.argsort(-excess, kind="stable")[:most])

    def _pay(self, offers: LayerOffers, left: Allowance) -> tuple[NDArray[np.intp], float]:
        limits = self.view.limits
        return layers_that_pay(offers, left, limits.max_layers, limits.horizon_steps, self.hysteresis)

    def _net(self, offers: LayerOffers) -> Floats:
        """Return float64[layers], seconds per step that each layer gains, net of its move spread over devices."""
        net: Floats = offers.saved_s - (1 + self.hysteresis) * offers.receive_s.mean(axis=1) / max(
            self.view.limits.horizon_steps, 1.0
        )
        return net

    def _offers(self, packing: Packing, base: _Priced) -> LayerOffers:
        """Price a placement against the base, layer by layer."""
        compute_before, exchange_before, num_before, seconds_before = base
        compute_s, exchange_s, receives, receive_s = self._priced(packing)
        saved_s = compute_before + exchange_before - compute_s - exchange_s
        differs = (packing.expert != self.base.expert).any(axis=(1, 2)) | (packing.share != self.base.share).any(
            axis=(1, 2)
        )
        return LayerOffers(saved_s, compute_s, receives - num_before, receive_s - seconds_before, differs)

    def _priced(self, packing: Packing) -> _Priced:
        """Return seconds of work and of rows by layer, and by device what it receives, and the seconds of that."""
        found = score(self.view.load, self._table(packing), self.view.devices, self.view.prices)
        devices, table = self.view.devices, self.view.table
        live = np.flatnonzero(devices.is_alive)
        num_layers, num_experts, num_devices, _ = self.problem.shape
        is_new = np.take_along_axis(
            self.problem.moved.swapaxes(1, 2), np.where(packing.expert == EMPTY, num_experts, packing.expert), axis=2
        )
        nodes, node_at = np.unique(devices.node_of[live], return_inverse=True)
        in_node = np.zeros((len(nodes), num_layers, num_experts), np.bool_)
        at, layer, slot = np.nonzero(table.logical_of[live] != EMPTY)
        in_node[node_at[at], layer, table.logical_of[live[at], layer, slot]] = True
        layer, at, slot = np.nonzero(is_new)
        is_near = in_node[node_at[at], layer, packing.expert[layer, at, slot]]
        _, node_s, far_s = (self.view.prices.expert_bytes / each for each in self.view.prices.move_bytes_per_s)
        index = layer * num_devices + at
        count = np.bincount(index, minlength=num_layers * num_devices).reshape(num_layers, num_devices)
        seconds = np.bincount(index, np.where(is_near, node_s, far_s), num_layers * num_devices)
        return found.compute_s, found.exchange_s, count, seconds.reshape(num_layers, num_devices)

    def _table(self, packing: Packing) -> ExpertTable:
        """Return the placement as a table, without shares where all copies have equal ones."""
        devices, old = self.view.devices, self.view.table
        live = np.flatnonzero(devices.is_alive)
        logical_of = np.full(old.logical_of.shape, EMPTY, np.int32)
        logical_of[live] = packing.expert.swapaxes(0, 1)
        shares: Floats | None = None
        if not np.allclose(packing.share, even_shares(packing.expert, self.problem.shape[1]), rtol=0, atol=1e-9):
            shares = np.zeros(logical_of.shape)
            shares[live] = packing.share.swapaxes(0, 1)
        return ExpertTable(old.version + 1, logical_of, old.num_experts, devices.is_alive.copy(), shares)
