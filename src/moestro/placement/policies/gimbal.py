"""Gimbal's first paper, Algorithm 3 and its integer program solved exactly, and a reconstruction of the second one.

The second paper is known by its abstract only. The affinity between experts of consecutive layers has two readings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad, LayerPairs
from moestro.core.experts.expert_table import ExpertTable
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits, PlaceView, even_sizes, table_with
from moestro.placement.integer_program import IntegerProgram, objective_s
from moestro.placement.policies.moestro import MoestroPlacement

Scope = Literal["layer", "model"]
Cut = Literal["literal", "symmetric"]
SCOPES: tuple[Scope, ...] = ("layer", "model")
CUTS: tuple[Cut, ...] = ("literal", "symmetric")


@dataclass(frozen=True, slots=True, eq=False)
class Affinity:
    """Pairs of experts that tokens visit one after another; the strongest pair comes first.

    Attributes:
        layer: int64[pairs], the earlier layer; 0 throughout where one map serves all layers.
        expert, partner: int64[pairs], experts of the earlier and of the later layer.
        weight: float64[pairs], tokens per step, above 0.
    """

    layer: NDArray[np.int64]
    expert: NDArray[np.int64]
    partner: NDArray[np.int64]
    weight: NDArray[np.float64]


def pairs_of(load: ExpertLoad, policy: str) -> LayerPairs:
    """Return the load's pairs.

    Raises:
        ValueError: The load has none.
    """
    if load.pairs is None:
        raise ValueError(
            f"{policy} needs pairs of experts that tokens visit in neighbouring layers, and this load has none; "
            "collect the load from the experts of each token (ExpertLoad.pairs)"
        )
    return load.pairs


def rank_pairs(pairs: LayerPairs, num_experts: int, scope: Scope, cut: Cut) -> Affinity:
    """Rank pairs by weight; equal weights in the order of layer, expert and partner.

    Args:
        scope: "layer" keeps the weights E[i, j, k] of each two layers; "model" sums them to W[j, k] (equation 2).
        cut: "literal" counts pairs with j < k only, as equation 11 does. "symmetric" counts all of them: with scope
            "model" it adds W[k, j] to W[j, k] and drops W[j, j], which no placement can cut.
    """
    layer = pairs.layer.astype(np.int64)
    first, second = pairs.expert.astype(np.int64), pairs.next_expert.astype(np.int64)
    if scope == "model":
        layer = np.zeros_like(layer)
        if cut == "symmetric":
            first, second = np.minimum(first, second), np.maximum(first, second)
    counts = first < second if cut == "literal" or scope == "model" else np.ones(len(first), np.bool_)
    counts &= pairs.count > 0
    key = ((layer * num_experts + first) * num_experts + second)[counts]
    key, which = np.unique(key, return_inverse=True)
    weight = np.zeros(len(key))
    np.add.at(weight, which, pairs.count[counts])
    order = np.lexsort((key, -weight))
    key, weight = key[order], weight[order]
    return Affinity(key // num_experts**2, key // num_experts % num_experts, key % num_experts, weight)


@dataclass(frozen=True, slots=True, eq=False)
class GimbalProgram:
    """The data of the program. It has no layer index: one map from experts to devices serves all layers.

    Attributes:
        activation: float64[layers, experts], the matrix A, tokens per step.
        affinity: pairs (j, k) with j < k and their weights W[j, k], scope "model".
        sizes: int64[devices], experts that each device holds: equation 4, which asks for m/g of each.
        alpha, beta: weights of imbalance and cut.
    """

    activation: NDArray[np.float64]
    affinity: Affinity
    sizes: NDArray[np.int64]
    alpha: float
    beta: float

    def cost(self, device_of: NDArray[np.int64]) -> float:
        """Equation 12 for a map, int64[experts]."""
        is_on = device_of[:, None] == np.arange(len(self.sizes))
        loads = self.activation @ is_on  # equation 7
        ideal = self.activation.sum(axis=1, keepdims=True) / len(self.sizes)  # equations 5 and 6
        is_cut = device_of[self.affinity.expert] != device_of[self.affinity.partner]  # equation 11
        return self.alpha * float(np.abs(loads - ideal).max()) + self.beta * float(self.affinity.weight[is_cut].sum())


def solve_program(program: GimbalProgram, time_limit_s: float) -> NDArray[np.int64]:
    """Return the device of each expert, int64[experts], at the least cost.

    The same-part indicators s are continuous here: with 0-1 x and a positive weight, each takes the value 0 or 1.

    Raises:
        ConfigError: scipy is not installed.
        ValueError: No optimum is proven within the time.
    """
    num_layers, num_experts = program.activation.shape
    num_devices = len(program.sizes)
    first, second, weight = program.affinity.expert, program.affinity.partner, program.affinity.weight
    solver = IntegerProgram("gimbal_v1_milp")
    unit = float(program.activation.max(initial=0.0)) or 1.0  # the solver's tolerances are absolute
    x = solver.binaries(num_experts, num_devices)
    deviation = solver.continuous(1, cost=program.alpha * unit)  # D, in units
    same = [solver.continuous(1, num_devices, upper=1.0, cost=-program.beta * float(each)) for each in weight]
    solver.constrain(x, 1.0, 1.0, 1.0)  # equation 3
    solver.constrain(x.T, 1.0, program.sizes.astype(np.float64), program.sizes.astype(np.float64))  # equation 4
    activation = program.activation / unit
    ideal = activation.sum(axis=1) / num_devices
    for device in range(num_devices):
        ids = np.tile(np.append(x[:, device], deviation), (num_layers, 1))
        ones = np.ones((num_layers, 1))
        solver.constrain(ids, np.hstack([activation, -ones]), -np.inf, ideal)  # equation 8
        solver.constrain(ids, np.hstack([activation, ones]), ideal, np.inf)  # equation 9
    for j, k, s in zip(first, second, same, strict=True):  # equation 10
        together = s.ravel()
        solver.constrain(np.stack([together, x[j]], axis=1), np.array([1.0, -1.0]), -np.inf, 0.0)
        solver.constrain(np.stack([together, x[k]], axis=1), np.array([1.0, -1.0]), -np.inf, 0.0)
        solver.constrain(np.stack([together, x[j], x[k]], axis=1), np.array([1.0, -1.0, -1.0]), -1.0, np.inf)
    values = solver.solve(time_limit_s)
    device_of: NDArray[np.int64] = values[x].argmax(axis=1)
    return device_of


WordT = TypeVar("WordT", bound=str)
SOURCE = "Gimbal v1 (arXiv 2602.21626), section III-D"


@PLACE_POLICIES.register(
    "gimbal_v1",
    "Puts experts with strong inter-layer affinity on one anchor device, and the others on the least loaded ones.",
    source=f"{SOURCE}, Algorithm 3",
)
@dataclass(frozen=True, slots=True)
class GimbalV1Placement:
    """Algorithm 3: co-locates affine experts on an anchor device and balances the rest greedily.

    The algorithm runs once at load and again every tau steps (the paper: 3000). The caller decides when: tau belongs to
    the loop that calls this policy. Each expert gets one copy, so that redundant slots stay empty.
    The paper's affinity comes from one offline run, so a group ranks its pairs once (`for_group`); a call of its own
    ranks those of its load.
    docs/placement_objective.md lists where the paper is silent and what this policy does there.

    Attributes:
        anchor: index k of the anchor device. If that one is dead, the next live one in turn serves.
        top_pairs: number of strongest pairs whose experts form the set M: of each two consecutive layers with scope
            "layer", of the whole model with scope "model".
        min_tokens: a pair counts only if more tokens per step than this follow it.
        scope: "layer" places each layer's experts; "model" uses one map for all layers, as equations 3 to 12 do.
        cut: "literal" counts pairs (j, k) with j < k only, as equation 11 does; "symmetric" counts all.
    """

    needs_pairs: ClassVar[bool] = True  # live placement asks engines for pairs only where a policy needs them
    has_payback_gate: ClassVar[bool] = False  # the algorithm moves experts at every interval

    anchor: int = 0
    top_pairs: int = 8
    min_tokens: float = 0.0
    scope: str = "layer"
    cut: str = "symmetric"

    def __post_init__(self) -> None:
        if self.anchor < 0 or self.top_pairs < 0 or self.min_tokens < 0:
            raise ConfigError("anchor, top_pairs and min_tokens must not be negative")
        checked_word("scope", self.scope, SCOPES)
        checked_word("cut", self.cut, CUTS)

    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return Algorithm 3's placement, with the set M of the present load.

        Raises:
            ValueError: The load has no pairs, the anchor does not exist, or the experts do not fit.
        """
        return self.placed(view, self.affinity(view))

    def for_group(self) -> FixedAffinity:
        """Return the policy of one group, whose pairs are ranked once."""
        return FixedAffinity(self)

    def affinity(self, view: PlaceView) -> Affinity:
        """Rank the pairs of the present load.

        Raises:
            ValueError: The load has no pairs.
        """
        scope, cut = checked_word("scope", self.scope, SCOPES), checked_word("cut", self.cut, CUTS)
        return rank_pairs(pairs_of(view.load, "gimbal_v1"), view.table.num_experts, scope, cut)

    def placed(self, view: PlaceView, affinity: Affinity) -> ExpertTable:
        """Run the procedure Exp-relocation with a ranking of pairs.

        Raises:
            ValueError: The anchor does not exist, or the experts do not fit.
        """
        scope = checked_word("scope", self.scope, SCOPES)
        sizes = even_sizes(view.devices, view.table.num_experts)
        anchor = _live_anchor(view, self.anchor)
        activation = view.load.total  # A
        if scope == "model":
            activation = activation.sum(axis=0, keepdims=True)
        affine = self._affine(affinity, activation.shape, int(sizes[anchor]), next_layer=int(scope == "layer"))
        device_of = place_greedily(activation, affine, sizes, anchor)
        holders = device_of == np.arange(len(sizes))[:, None, None]  # [devices, 1 or layers, experts]
        return table_with(view, np.broadcast_to(holders, view.table.num_copies.shape))

    def _affine(
        self, affinity: Affinity, shape: tuple[int, ...], capacity: int, *, next_layer: int
    ) -> NDArray[np.bool_]:
        """Return the set M, bool[layers, experts]: experts of the strongest pairs, as many as the anchor has room for.

        The threshold is tightened until M fits: the first pair that does not fit ends the list of its two layers.

        Args:
            shape: layers and experts.
            capacity: experts that the anchor holds in a layer.
            next_layer: layers between an expert and its partner.
        """
        affine = np.zeros(shape, np.bool_)
        num_taken = np.zeros(shape[0], np.int64)
        is_open = np.full(shape[0], self.top_pairs > 0)
        strong = affinity.weight > self.min_tokens
        columns = (affinity.layer[strong], affinity.expert[strong], affinity.partner[strong])
        for layer, expert, partner in zip(*(column.tolist() for column in columns), strict=True):
            if not is_open[layer]:
                continue
            wider = affine[[layer, layer + next_layer]].copy()
            wider[0, expert] = wider[next_layer, partner] = True
            if wider.sum(axis=1).max() > capacity:
                is_open[layer] = False
                continue
            affine[layer], affine[layer + next_layer] = wider[0], wider[next_layer]
            num_taken[layer] += 1
            is_open[layer] = num_taken[layer] < self.top_pairs
        return affine


@dataclass(slots=True, eq=False)
class FixedAffinity:
    """Algorithm 3 in one group that serves: the first plan ranks the pairs, and all later ones keep its set M.

    Where the anchor changes or has less room, M is the strongest part of that ranking that fits.

    Attributes:
        policy: The policy.
    """

    policy: GimbalV1Placement
    _affinity: Affinity | None = None

    @property
    def needs_pairs(self) -> bool:
        """Whether pairs have still to be ranked."""
        return self._affinity is None

    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return the placement; raises as the policy does."""
        if self._affinity is None:
            self._affinity = self.policy.affinity(view)
        return self.policy.placed(view, self._affinity)


def place_greedily(
    activation: NDArray[np.float64], affine: NDArray[np.bool_], sizes: NDArray[np.int64], anchor: int
) -> NDArray[np.int64]:
    """Run the procedure Exp-relocation of Algorithm 3 in all layers at once.

    Args:
        activation: float64[layers, experts], the matrix A.
        affine: bool[layers, experts], the set M.
        sizes: int64[devices], experts that each device holds (equation 4).
        anchor: device k.

    Returns:
        int64[layers, experts], device of each expert.
    """
    num_layers, num_experts = activation.shape
    every = np.arange(num_layers)
    device_of = np.full(activation.shape, anchor)  # line 2
    room = np.tile(sizes, (num_layers, 1))
    room[:, anchor] -= affine.sum(axis=1)
    loads = np.zeros(room.shape)
    loads[:, anchor] = np.where(affine, activation, 0.0).sum(axis=1)
    order = np.argsort(np.where(affine, np.inf, -activation), axis=1, kind="stable")  # line 3; M comes last
    for nth in range(num_experts):
        expert = order[:, nth]
        is_left = ~affine[every, expert]
        device = np.where(room > 0, loads, np.inf).argmin(axis=1)
        layer, expert, device = every[is_left], expert[is_left], device[is_left]
        device_of[layer, expert] = device
        loads[layer, device] += activation[layer, expert]
        room[layer, device] -= 1
    return device_of


@PLACE_POLICIES.register(
    "gimbal_v1_milp",
    "Solves the first Gimbal paper's integer program exactly, for small models: one map for all layers.",
    source=f"{SOURCE}, equations 3 to 12, solved by HiGHS",
)
@dataclass(frozen=True, slots=True)
class GimbalMilpPlacement:
    """Equations 3 to 12: the least weighted sum of imbalance and cut, with one map of experts for all layers.

    Attributes:
        alpha: weight of D, the largest deviation from a layer's mean load, in tokens per step. The paper gives none.
        beta: weight of the cut, in tokens per step. The paper gives none.
        cut: "literal" counts pairs (j, k) with j < k only, as equation 11 does; "symmetric" counts all.
        time_limit_s: time after which the search gives up, seconds; small models take less than one.
    """

    needs_pairs: ClassVar[bool] = True
    has_payback_gate: ClassVar[bool] = False
    reads_clock: ClassVar[bool] = True  # a search that takes too long fails, on one machine and not on another

    alpha: float = 1.0
    beta: float = 1.0
    cut: str = "literal"
    time_limit_s: float = 2.0

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and self.beta > 0 and self.time_limit_s > 0):
            raise ConfigError(
                f"alpha, beta and time_limit_s must be above 0, got {self.alpha:g}, {self.beta:g} and"
                f" {self.time_limit_s:g}"
            )
        checked_word("cut", self.cut, CUTS)

    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return the program's optimum.

        Raises:
            ConfigError: scipy is not installed.
            ValueError: The load has no pairs, the experts do not fit, or no optimum is proven within the time.
        """
        num_experts = view.table.num_experts
        affinity = rank_pairs(
            pairs_of(view.load, "gimbal_v1_milp"), num_experts, "model", checked_word("cut", self.cut, CUTS)
        )
        sizes = even_sizes(view.devices, num_experts)
        used = np.flatnonzero(sizes)
        program = GimbalProgram(view.load.total, affinity, sizes[used], self.alpha, self.beta)
        device_of = used[solve_program(program, self.time_limit_s)]
        holders = device_of == np.arange(len(sizes))[:, None, None]
        return table_with(view, np.broadcast_to(holders, view.table.num_copies.shape))


def checked_word(setting: str, word: str, allowed: tuple[WordT, ...]) -> WordT:
    """Return a setting that is one of some words.

    Raises:
        ConfigError: The word is none of them.
    """
    for each in allowed:
        if word == each:
            return each
    raise ConfigError(f"{setting} must be one of {', '.join(allowed)}, got {word!r}")


def _live_anchor(view: PlaceView, anchor: int) -> int:
    """Return the first live device from `anchor` on, in turn."""
    num_devices = view.devices.num_devices
    if anchor >= num_devices:
        raise ValueError(f"the anchor is device {anchor}, and there are {num_devices} devices")
    live = np.flatnonzero(view.devices.is_alive)
    return int(live[((live - anchor) % num_devices).argmin()])


# The objective has equal shares and mean loads, and a move needs to pay just once.
_SEARCH = MoestroPlacement(weighted=0, risk=0.0, hysteresis=0.0)


@PLACE_POLICIES.register_function(
    "gimbal_v2",
    "lowers the seconds of load, source-aware rows and moves, with equal shares, and without other limits than the"
    " horizon",
    source="our reconstruction of Gimbal v2 (arXiv 2606.15177, abstract only); docs/placement_objective.md",
)
def gimbal_v2(view: PlaceView) -> ExpertTable:
    """Return the placement with the least `objective_s` that the search of `moestro` finds, or the present one.

    Raises:
        ValueError: The experts do not fit the live devices.
    """
    found = _SEARCH(replace(view, limits=PlaceLimits(horizon_steps=view.limits.horizon_steps)))
    all_run = bool((view.table.is_alive == view.devices.is_alive).all())
    if all_run and objective_s(view, found) >= objective_s(view, view.table):
        return view.table
    return found
