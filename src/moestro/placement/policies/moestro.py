"""Moestro's own placement policy: few moves, shares of copies, near copies, and no change that does not pay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_table import ExpertTable
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, Floats, PlaceView, origins_of
from moestro.placement.payback import live_table
from moestro.placement.score import on_one_core
from moestro.placement.search.by_price import WORTH, PriceSearch, eplb_starts, pack_tokens, thinned
from moestro.placement.search.filling import recover, restore
from moestro.placement.search.problem import (
    TINY,
    Allowance,
    Experts,
    LayerOffers,
    LayerPrices,
    Packing,
    PlaceProblem,
    Pricer,
    allowance_of,
    in_old_slots,
    layers_that_pay,
    present_packing,
    problem_of,
    table_of,
)
from moestro.placement.search.replicas import copy_counts, share_out
from moestro.placement.search.search import (
    SHARE_STEPS,
    SearchLimits,
    SmallSearch,
    is_level,
    is_small,
    pack_anew,
    prepare,
    settle,
    start_anew,
)

# After a death, service comes before the last percent: fewer copies move, and the next change levels the rest.
URGENT_TARGET = 0.97
# A layer with a lower mean load over largest load is only placed anew, because exchanges take longer. A new placement
# joins more devices by copies, so that shares can level the next window. At 0.55, up to two fifths fewer copies move,
# and the balance of the next window is up to 0.7 % lower, or 1.7 % lower where the shares are set anew for it.
FAR_OFF = 0.65
# A layer that misses the target by more is also placed anew; for less, it would move most of its copies.
MISSED_BY = 0.01
# A layer that is placed anew comes closer to its target by this factor, because its exchanges move nothing further.
CLOSER = 0.25
# With a lower target, few moves come before the last percent: steps by the price itself leave level layers alone.
WHOLE_PRICE = 0.999
TRIED_FIRST = 2  # layers in which steps by the price have to gain something before all others are searched
ROUNDING = 1e-9  # of the seconds of a step; a smaller gain is none


def closer(target: Floats | float) -> Floats | float:
    """Return the target of a layer that is placed anew."""
    return 1 - (1 - target) * CLOSER


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

    The search starts from the present table and moves no more than its target takes: further copies of the experts with
    the heaviest ones, then shares, then exchanges; where few copies may move, single ones that join heavy devices to
    light ones come before exchanges; where no expert can have another copy, they go to the exchanges that lower the
    largest loads most, in whichever layers. Layers that are far off or miss the target are placed anew. Each layer
    takes what is best for it; layers whose savings pay for their move are changed, and the limits of the view are never
    exceeded, except that experts without a live copy are always placed.
    Groups of experts (`num_groups`) are ignored: they bound which experts a token takes, not where these live.

    Attributes:
        target: Mean load over largest load at which a layer is left alone: fewer moves below 1.
        slack: Part of its load that a device may have more so that rows travel less. Small problems are searched by
            their whole price, where it has no part.
        hysteresis: Part by which savings over the horizon must exceed the seconds of the move.
        risk: Standard deviations of an expert's tokens that are added to their mean; variance as of independent tokens
            does not count. FlashLB's 0.674 (the upper quartile) in a sweep of 0 to 1 on next windows: balance -0.001
            where all experts vary alike, and +0.035 where a fifth of them is bursty.
        weighted: 1 for shares of copies, 0 for equal parts.
        rounds: Rounds of exchanges for balance.
        turns: Rotations of pairs of devices for nearness.

    Raises:
        ConfigError: A setting is out of range.
    """

    # Filling empty slots moves copies and levels devices otherwise than the search, so peers are candidates again.
    filled_peers: ClassVar[tuple[str, ...]] = ("static", "eplb", "eplb:hierarchy=never", "gimbal_v2")

    target: float = 0.999
    slack: float = 0.01
    hysteresis: float = 0.1
    risk: float = 0.674
    weighted: int = 1
    rounds: int = 12
    turns: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ConfigError(f"target must be above 0 and at most 1, got {self.target:g}")
        for name in ("slack", "hysteresis", "risk", "rounds", "turns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name):g}")

    @on_one_core
    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return the next placement, or the present one where no change pays.

        Raises:
            ValueError: The live devices have fewer slots than there are experts.
        """
        origin = origins_of(view.load, view.devices)
        problem = problem_of(view, origin, self.risk, has_ways=live_table(view.table, view.devices) is not None)
        if int(problem.room.sum()) < problem.shape[1]:
            raise ValueError(
                f"{problem.shape[1]} experts do not fit into the {int(problem.room.sum())} slots of the live devices"
            )
        allowance = allowance_of(view.limits, view.prices.expert_bytes, len(problem.speed))
        base = present_packing(view, problem)
        restored = restore(problem, base, allowance)
        limits = SearchLimits(self.target, self.slack, self.rounds, self.turns, SHARE_STEPS if self.weighted else 0)
        plan = _Plan(view, problem, base, self.hysteresis, Pricer.of(view, problem, origin))
        if len(restored):
            urgent = replace(limits, target=min(self.target, URGENT_TARGET), num_turns=0)
            return plan.urgent(urgent, allowance, restored)
        others = []
        if self.weighted and is_small(problem):
            # Equal shares lead a search to other copies, which in one of eight small problems are the better ones.
            even = replace(self, weighted=0, risk=0.0)(view)
            others.append(present_packing(replace(view, table=even), problem))
        return plan.best(limits, allowance, others)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """One plan of the policy.

    Attributes:
        view, problem: What is planned.
        base: The present placement, with all experts covered; what is not changed stays so.
        hysteresis: Part by which savings must exceed the seconds of the move.
        pricer: What placements cost.
    """

    view: PlaceView
    problem: PlaceProblem
    base: Packing
    hysteresis: float
    pricer: Pricer

    def urgent(self, limits: SearchLimits, allowance: Allowance, restored: NDArray[np.intp]) -> ExpertTable:
        """Return the base, leveled by few moves where that makes the slowest device faster; no gate, for it is due."""
        before = self.problem.load(self.base.work).max(axis=1)
        layers = self._layers_to_change(restored)
        if limits.num_share_steps:
            plan = self._all_layers(self.base)
            recovered = self.base.of_layers(layers)
            some = self.problem.of_layers(layers)
            goal = some.even_load(recovered.work) / limits.target
            share_out(some, recovered, goal, 1)
            recover(some, recovered, goal, allowance)
            plan.put(layers, recovered)
        else:
            plan = self._searched((layers, np.zeros(0, np.intp)), copy_counts(self.problem), limits, allowance)
        return self._table(np.flatnonzero(self.problem.load(plan.work).max(axis=1) < before), plan)

    def best(self, limits: SearchLimits, allowance: Allowance, others: list[Packing]) -> ExpertTable:
        """Return the best table within the limits.

        Args:
            limits: How far the search goes.
            allowance: Copies that may be received.
            others: Further placements, found before.
        """
        left = Allowance(allowance.total, allowance.each.copy())
        base, layers = self.pricer.price(self.base), self._layers_to_change(np.zeros(0, np.intp))
        is_near = is_level(self.problem, self.base, FAR_OFF)[layers] | allowance.is_limited
        counts = copy_counts(self.problem)
        plan = self._searched((layers[is_near], layers[~is_near]), counts, limits, allowance)
        prices = self.pricer.price(plan)
        offer = _Offer.of(self, plan, _offers(prices, base), left)
        missed = layers[is_near & ~is_level(self.problem, plan, limits.target - MISSED_BY)[layers]]
        anew = self._anew(plan, self._worth_anew(plan, missed, left), counts, limits)
        found = [self.base, plan, *others, *([] if anew is None else [anew])]
        for each in found[2:]:
            offer = self._better(offer, each, _offers(self.pricer.price(each), base), left)
        is_level_enough = np.zeros(len(base.step_s), np.bool_)
        if limits.target < WHOLE_PRICE:
            is_level_enough = is_level(self.problem, plan, limits.target)
        search = self._price_search(limits, may_receive=not allowance.is_limited)
        stepped, prices = self._stepped(search, found, counts, layers[~is_level_enough[layers]], prices)
        if stepped is not None:
            offer = self._better(offer, stepped, _offers(prices, base), left)
        if not len(offer.chosen) and (self.view.table.is_alive == self.view.devices.is_alive).all():
            return self.view.table
        return self._table(offer.chosen, offer.plan)

    def _anew(self, plan: Packing, missed: NDArray[np.intp], counts: Experts, limits: SearchLimits) -> Packing | None:
        """Return the plan with the layers that missed the target placed anew; all layers where the problem is small."""
        if is_small(self.problem):
            weight = (1 + self.hysteresis) / max(self.view.limits.horizon_steps, TINY)
            return SmallSearch(self.pricer, self.problem, limits, weight).best(self.base)
        if not len(missed):
            return None
        anew = self._all_layers(plan)
        closer_limits = replace(limits, target=closer(limits.target))
        anew.put(missed, start_anew(self.problem.of_layers(missed), counts[missed], closer_limits))
        return anew

    def _price_search(self, limits: SearchLimits, *, may_receive: bool) -> PriceSearch:
        weight = (1 + self.hysteresis) / max(self.view.limits.horizon_steps, 1.0)
        return PriceSearch(self.pricer, self.problem, weight, may_receive, limits.num_share_steps)

    def _stepped(
        self,
        search: PriceSearch,
        found: list[Packing],
        counts: Experts,
        layers: NDArray[np.intp],
        prices: LayerPrices,
    ) -> tuple[Packing | None, LayerPrices]:
        """Return the plan with some layers as steps by the price itself leave them; None where none is worth it.

        Layers of one network are alike: where steps gain nothing in the first few, the others are left alone.

        Args:
            search: Takes the steps; where no copies may be received, they are only dropped.
            found: The base, the plan, and other placements.
            counts: int64[layers, experts], the best numbers of copies.
            layers: Layers that may change.
            prices: What the plan costs.

        Returns:
            The changed plan, and what it costs.
        """
        worthwhile = search.worthwhile(prices.step_s)
        worthwhile = worthwhile[np.isin(worthwhile, layers)]
        if not len(worthwhile):
            return None, prices
        stepped, cost = self._all_layers(found[1]), search.cost_of(prices)
        for some in (worthwhile[:TRIED_FIRST], worthwhile[TRIED_FIRST:]):
            if not len(some):
                break
            better, changed = search.best(self._starts(found, counts, some, may_receive=search.may_receive), some)
            stepped.put(some, better)
            prices = prices.with_layers(some, changed)
            if search.cost_of(changed).sum() > (1 - WORTH) * cost[some].sum():
                break
        return stepped, prices

    def _starts(
        self, found: list[Packing], counts: Experts, layers: NDArray[np.intp], *, may_receive: bool
    ) -> list[Experts]:
        """Return placements of some layers from which steps are taken, int64[layers, devices, slots] each."""
        some, total = self.problem.of_layers(layers), self.pricer.origin.total[layers]
        if not may_receive:
            starts = [each.expert[layers] for each in found[:2]]
            return [*starts, thinned(some, self.base.expert[layers], counts[layers])]
        starts = [each.expert[layers] for each in found]
        starts += [pack_anew(some, counts[layers]).expert, pack_tokens(some, total)]
        return [*starts, *eplb_starts(self.view, some, total)]

    def _table(self, layers: NDArray[np.intp], plan: Packing) -> ExpertTable:
        """Return the base with some layers from a plan; what a device keeps stays in its slot."""
        base = self.base
        expert, share = base.expert.copy(), base.share.copy()
        expert[layers], share[layers] = in_old_slots(
            (plan.expert[layers], plan.share[layers]), base.expert[layers], self.problem.shape[1]
        )
        return table_of(self.view, expert, share)

    def _searched(
        self,
        layers_of: tuple[NDArray[np.intp], NDArray[np.intp]],
        counts: Experts,
        limits: SearchLimits,
        allowance: Allowance,
    ) -> Packing:
        """Return the base with some layers improved, and others placed anew.

        Args:
            layers_of: Both.
            counts: int64[layers, experts], the best numbers of copies.
        """
        near, far = layers_of
        layers = np.sort(np.concatenate([near, far]))
        if len(far) == self.problem.shape[0]:  # nothing of the base stays
            plan = pack_anew(self.problem, counts)
        else:
            plan = self._all_layers(self.base)
            if len(near):
                warm = plan.of_layers(near)
                prepare(self.problem.of_layers(near), warm, counts[near], limits, allowance)
                plan.put(near, warm)
            if len(far):
                plan.put(far, pack_anew(self.problem.of_layers(far), counts[far]))
        if len(layers):
            target = np.where(np.isin(layers, far), closer(limits.target), limits.target)
            changed = plan if len(layers) == self.problem.shape[0] else plan.of_layers(layers)
            settle(self.problem.of_layers(layers), changed, replace(limits, target=target), allowance)
            if changed is not plan:
                plan.put(layers, changed)
        return plan

    def _better(self, offer: _Offer, other: Packing, priced: LayerOffers, left: Allowance) -> _Offer:
        """Return the better of an offer and the same with those layers from another plan that gain by it."""
        is_better = self._net(priced) > self._net(offer.layers)
        if not is_better.any():
            return offer
        best, rows = self._all_layers(offer.plan), np.flatnonzero(is_better)
        best.put(rows, other.of_layers(rows))
        mixed = _Offer.of(self, best, offer.layers.with_layers(is_better, priced), left)
        return mixed if mixed.net > offer.net else offer

    def _all_layers(self, packing: Packing) -> Packing:
        """Return a copy."""
        return packing.of_layers(np.arange(self.problem.shape[0]))

    def _worth_anew(self, plan: Packing, layers: NDArray[np.intp], left: Allowance) -> NDArray[np.intp]:
        """Return the least level of some layers, as many as may receive all of their copies."""
        most = left.total / max(int(self.problem.room.sum()), 1)
        if most >= len(layers):
            return layers
        work = plan.work[layers]
        excess = self.problem.load(work).max(axis=1) / np.maximum(self.problem.even_load(work), TINY)
        return np.sort(layers[np.argsort(-excess, kind="stable")[: int(most)]])

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

    def _net(self, offers: LayerOffers) -> Floats:
        """Return float64[layers], seconds per step that each layer gains, net of its move spread over devices."""
        net: Floats = offers.saved_s - (1 + self.hysteresis) * offers.receive_s.mean(axis=1) / max(
            self.view.limits.horizon_steps, 1.0
        )
        return net


def _offers(prices: LayerPrices, base: LayerPrices) -> LayerOffers:
    """Compare a placement's prices with those of the base, layer by layer."""
    saved_s = base.step_s - prices.step_s
    saved_s[np.abs(saved_s) <= ROUNDING * base.step_s] = 0.0
    return LayerOffers(saved_s, prices.receives - base.receives, prices.receive_s - base.receive_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """What a plan would save, and the layers of it that pay.

    Attributes:
        plan, layers: The plan, and what its layers save and cost.
        chosen: Layers that pay.
        net: Seconds that these gain over the horizon, net of the move.
    """

    plan: Packing
    layers: LayerOffers
    chosen: NDArray[np.intp]
    net: float

    @classmethod
    def of(cls, of: _Plan, plan: Packing, layers: LayerOffers, left: Allowance) -> _Offer:
        """Choose the layers that pay within what may be received."""
        limits = of.view.limits
        chosen, net = layers_that_pay(layers, left, limits.max_layers, limits.horizon_steps, of.hysteresis)
        return cls(plan, layers, chosen, net)
