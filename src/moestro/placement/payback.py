"""Whether a change of placement pays: seconds saved per step against the seconds of the move, and how plans lasted.

A plan fits the window that it was made for, and the next window is another one: noise, or other domains. So of a
saving, what earlier plans of the same kind predicted too much is not expected.

1. *Short* plans are made for the last window. What they predict is priced under that window with its noise once more.
2. *Long* plans are made for the mean of all remembered windows, and priced as the mean over these.
3. The *first* placement and that of now are candidates, too, and are expected to save what they are priced at, because
   no window made them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import Devices, PlacePolicy, PlaceView
from moestro.placement.score import Moves, PlaceScore, move_s, moves_between, score


@dataclass(frozen=True, slots=True, eq=False)
class Payback:
    """What a change of placement saves, and what it costs.

    Attributes:
        before: Cost of the present placement, on the devices that live.
        after: Cost of the new placement.
        moves: Copies that devices receive.
        move_s: Seconds in which the busiest device receives its copies.
        steps: Steps after which the move has paid for itself. None means never. A change is due at once (0.0) where a
            dead device took the last copy of an expert.
    """

    before: PlaceScore
    after: PlaceScore
    moves: Moves
    move_s: float
    steps: float | None

    @property
    def saved_s(self) -> float:
        """Seconds saved per step; negative where the new placement is slower."""
        return self.before.step_s - self.after.step_s


def payback(view: PlaceView, new_table: ExpertTable) -> Payback:
    """Price the change from the present placement to a new one, by the traffic model.

    Args:
        view: Load, present placement, devices and prices.
        new_table: Placement to which the devices would change.
    """
    served = live_table(view.table, view.devices)
    before = score(view.load, served or view.table, view.devices, view.prices)
    after = score(view.load, new_table, view.devices, view.prices)
    moves = moves_between(view.table, new_table, view.devices)
    seconds = move_s(moves, view.devices, view.prices)
    saved_s = before.step_s - after.step_s
    steps: float | None = None
    if served is None:
        steps = 0.0
    elif saved_s > 0:
        steps = seconds / saved_s
    return Payback(before, after, moves, seconds, steps)


def live_table(table: ExpertTable, devices: Devices) -> ExpertTable | None:
    """Return the placement as the live devices serve it; None means that an expert has no live copy.

    Slots of dead devices become empty, and the other copies take over their shares in proportion.
    """
    is_alive = devices.is_alive & table.is_alive
    if is_alive.all():
        return table
    logical_of = np.where(is_alive[:, None, None], table.logical_of, np.int32(EMPTY))
    held = table.num_copies[is_alive].sum(axis=0)
    if (held == 0).any():
        return None
    shares = table.shares
    if shares is not None:
        left = np.where(logical_of == EMPTY, 0.0, shares)
        layer = np.broadcast_to(np.arange(left.shape[1])[None, :, None], left.shape)
        index = layer * table.num_experts + np.maximum(logical_of, 0)
        totals = np.bincount(index.ravel(), left.ravel(), held.size)[index]
        # An expert whose live copies had no share at all is served by all of them evenly.
        even = 1.0 / np.maximum(held.ravel(), 1)[index]
        shares = np.where(totals > 0, left / np.where(totals > 0, totals, 1.0), even) * (logical_of != EMPTY)
    return ExpertTable(table.version, logical_of, table.num_experts, is_alive, shares)


SHORT, LONG, FIRST = "short", "long", "first"
# Windows that judge a plan. One is not enough for a long plan: where two loads take turns, the next window is the one
# that the plan weighs less.
JUDGED_BY = {SHORT: 1, LONG: 4}
# Part of a prediction that is expected before any plan was judged: the chance of several windows is less than of one.
PRIOR = {SHORT: 0.5, LONG: 0.8}
# Standard errors of what is predicted too much that are subtracted, too. Where two loads take turns, judgements of a
# long plan differ much, and their mean over four windows hardly does.
ERRORS = {SHORT: 1.0, LONG: 0.0}
SPREAD = 0.02  # standard deviation, as a part of a step, of what is predicted too much, before two plans were judged


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingSettings:
    """When a plan is followed.

    Attributes:
        least_share: Part of a step that a plan must be expected to save.
        num_windows: Windows that are remembered.
        half_life: Windows after which one counts half.
        hysteresis: Part by which the expected saving over the horizon must exceed the seconds of the move.
    """

    least_share: float = 0.02
    num_windows: int = 6
    half_life: float = 6.0
    hysteresis: float = 0.1


@dataclass(slots=True)
class _Excess:
    """By how much plans of a kind predicted more than later windows found, as parts of a step; older ones count less.

    What a plan gains by the chance of its own window is about the same part of a step, whether the plan saves much or
    little. So it is subtracted: a ratio that was learned from the first plan, which saves most, would let later ones
    chase noise.

    Attributes:
        prior: Part of a prediction that is expected before any plan was judged.
        num_errors: Standard errors that are subtracted, too.
        weight, total, squares: Judgements, and the sums of what they found too much and of its squares.
    """

    prior: float
    num_errors: float
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def judge(self, predicted: float, found: float) -> None:
        """Take in what a window found of a plan; both are parts of a step."""
        self.weight += 1.0
        self.total += predicted - found
        self.squares += (predicted - found) ** 2

    def age(self, kept: float) -> None:
        """Let all judgements so far count less."""
        self.weight *= kept
        self.total *= kept
        self.squares *= kept

    def expected(self, predicted: float) -> float:
        """Return what is to be expected of a prediction, less the uncertainty of it; never more than the prediction."""
        if not self.weight:
            return self.prior * predicted
        mean = self.total / self.weight
        variance = (SPREAD**2 + self.squares - self.weight * mean**2) / (1 + self.weight)
        return predicted - max(mean + self.num_errors * math.sqrt(max(variance, 0.0) / self.weight), 0.0)


@dataclass(slots=True, eq=False)
class _Shadow:
    """A plan that the next windows will judge, whether it was followed or not.

    Attributes:
        kind: Kind of the plan.
        base, table: Placements before and after.
        predicted: Part of a step that it was predicted to save.
        num_left: Windows that have still to judge it.
    """

    kind: str
    base: ExpertTable
    table: ExpertTable
    predicted: float
    num_left: int


@dataclass(slots=True, eq=False)
class LastingPlans:
    """A placement policy that follows another one where its plans last. It belongs to one group.

    Attributes:
        policy: Makes plans; sees loads of one window or of several.
        settings: When a plan is followed.
        reason: Why the last call left the table or changed it, in words.
    """

    policy: PlacePolicy
    settings: LastingSettings = field(default_factory=LastingSettings)
    reason: str = ""
    _windows: list[ExpertLoad] = field(default_factory=list)
    _excess: dict[str, _Excess] = field(default_factory=dict)
    _shadows: list[_Shadow] = field(default_factory=list)
    _first: ExpertTable | None = None
    _num_calls: int = 0

    def __post_init__(self) -> None:
        self._excess = {kind: _Excess(PRIOR[kind], ERRORS[kind]) for kind in JUDGED_BY}

    @property
    def needs_pairs(self) -> bool:
        """Whether the policy needs pairs of experts."""
        return bool(getattr(self.policy, "needs_pairs", False))

    def __call__(self, view: PlaceView) -> ExpertTable:
        """Return the placement of the plan that is expected to save enough, or the present one."""
        if live_table(view.table, view.devices) is None or not (view.devices.is_alive == view.table.is_alive).all():
            self._forget()
            self.reason = "devices changed"
            return self.policy(view)
        if self._windows and self._windows[-1].tokens.shape != view.load.tokens.shape:
            self._forget()
        self._judge(view)
        self._remember(view)
        priced_s = _step_s(view.load, view.table, view)
        best, saved_s, kind = view.table, 0.0, ""
        for name, (table, predicted_s) in self._candidates(view, priced_s).items():
            expected_s = predicted_s
            if name in self._excess:
                expected_s = priced_s * self._excess[name].expected(predicted_s / priced_s)
            net_s = expected_s - self._moves_s(view, table)
            if net_s > saved_s:
                best, saved_s, kind = table, net_s, name
        self._num_calls += 1
        if best is view.table:
            self.reason = "no plan is expected to save anything"
            return best
        measured_s = view.measured_step_s or 0.0
        step_s = max(priced_s, measured_s)  # prices leave out attention, and all that is not experts
        of_what = f"a step of {step_s * 1e3:.3g} ms ({'measured' if measured_s > priced_s else 'priced'})"
        self.reason = f"the {kind} plan is expected to save {saved_s / step_s:.2%} of {of_what}"
        if saved_s < self.settings.least_share * step_s:
            self.reason += f", and {self.settings.least_share:.2%} are required"
            return view.table
        return replace(best, version=view.table.version + 1)

    def _forget(self) -> None:
        self._windows.clear()
        self._shadows.clear()
        self._first = None

    def _judge(self, view: PlaceView) -> None:
        """Let the window judge the plans that were made before it."""
        for excess in self._excess.values():
            excess.age(0.5 ** (1 / self.settings.half_life))
        for shadow in self._shadows:
            if shadow.table.logical_of.shape != view.table.logical_of.shape:
                continue
            before_s, after_s = (_step_s(view.load, each, view) for each in (shadow.base, shadow.table))
            if before_s > 0:
                self._excess[shadow.kind].judge(shadow.predicted, 1 - after_s / before_s)
            shadow.num_left -= 1
        self._shadows = [each for each in self._shadows if each.num_left]

    def _remember(self, view: PlaceView) -> None:
        self._first = self._first or view.table
        self._windows.append(replace(view.load, pairs=None))
        del self._windows[: -self.settings.num_windows]

    def _candidates(self, view: PlaceView, priced_s: float) -> dict[str, tuple[ExpertTable, float]]:
        """Return placements by kind, with the seconds a step that each one is predicted to save.

        Args:
            priced_s: Seconds of a step now.
        """
        found: dict[str, tuple[ExpertTable, float]] = {}
        short = self.policy(view)
        noisy = with_noise(view.load, self._num_calls)
        found[SHORT] = short, _step_s(noisy, view.table, view) - _step_s(noisy, short, view)
        if len(self._windows) > 1:
            weights = self._weights()
            long = self.policy(replace(view, load=replace(mean_load(self._windows, weights), pairs=view.load.pairs)))
            found[LONG] = long, self._saved_s(view, long, weights)
            if self._first is not None and self._first.logical_of.shape == view.table.logical_of.shape:
                found[FIRST] = self._first, self._saved_s(view, self._first, weights)
        for kind, num_windows in JUDGED_BY.items():
            if kind in found and found[kind][0] is not view.table and priced_s > 0:
                table, predicted_s = found[kind]
                self._shadows.append(_Shadow(kind, view.table, table, predicted_s / priced_s, num_windows))
        return found

    def _weights(self) -> np.ndarray:
        """Return float64[windows], weights of windows by their age and their steps; they sum to 1."""
        ages = np.arange(len(self._windows))[::-1]
        weights = 0.5 ** (ages / self.settings.half_life) * [max(each.num_steps, 1.0) for each in self._windows]
        return np.asarray(weights / weights.sum())

    def _saved_s(self, view: PlaceView, table: ExpertTable, weights: np.ndarray) -> float:
        each = [_step_s(load, view.table, view) - _step_s(load, table, view) for load in self._windows]
        return float(weights @ each)

    def _moves_s(self, view: PlaceView, table: ExpertTable) -> float:
        """Return the seconds per step of the moves, spread over the horizon."""
        if table is view.table:
            return 0.0
        seconds = move_s(moves_between(view.table, table, view.devices), view.devices, view.prices)
        return (1 + self.settings.hysteresis) * seconds / max(view.limits.horizon_steps, 1.0)


def _step_s(load: ExpertLoad, table: ExpertTable, view: PlaceView) -> float:
    return score(load, table, view.devices, view.prices).step_s


def with_noise(load: ExpertLoad, seed: int) -> ExpertLoad:
    """Return a window as another one of as many steps might be, if only chance differs.

    A plan that fits the chance of its own window gains nothing by it in this one.
    """
    total = load.total
    spread = np.sqrt(load.variance / max(load.num_steps, 1.0)) / np.maximum(total, np.finfo(float).tiny)
    factor = np.maximum(1 + spread * np.random.default_rng(seed).standard_normal(total.shape), 0.0)
    return replace(load, tokens=load.tokens * np.where(total > 0, factor, 1.0))


def mean_load(windows: list[ExpertLoad], weights: np.ndarray) -> ExpertLoad:
    """Return the load of several windows together, with the variance between them.

    Args:
        weights: float64[windows], which sum to 1.
    """
    tokens = np.tensordot(weights, np.stack([each.tokens for each in windows]), 1)
    within = np.tensordot(weights, np.stack([each.variance for each in windows]), 1)
    totals = np.stack([each.total for each in windows])
    between = np.tensordot(weights, (totals - tokens.sum(axis=0)) ** 2, 1)
    activated = np.tensordot(weights, np.stack([each.activated for each in windows]), 1)
    return ExpertLoad(tokens, within + between, activated, sum(each.num_steps for each in windows))
