"""Whether a change of placement pays: seconds saved per step against the seconds of the move, and how plans lasted.

A plan fits the window that it was made for, and the next window is another one: noise, or other domains. So a plan is
judged by the next window, which it has not seen, and what is expected of the next plan is what that window found.

1. *Short* plans are made for the last window. The newest findings decide.
2. *Long* plans are made for the mean of all remembered windows; a short plan that is followed begins a new memory.
3. The *first* placement is a plan, too, which no window made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.errors import MoestroError
from moestro.placement.contract import PLACE_POLICIES, Devices, PlacePolicy, PlaceView
from moestro.placement.score import Moves, PlaceScore, each_move_s, move_s, moves_between, score


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


STAY = "static"  # the policy that moves nothing
Rows = NDArray[np.integer]  # [layers, slots of all live devices], expert in each slot


def peer_tables(policy: PlacePolicy, view: PlaceView) -> dict[str, ExpertTable]:
    """Return placements by name, above which a policy's own may not be priced once all slots are filled.

    Args:
        policy: Names its peers in `filled_peers`; one without that attribute has none.
        view: What the policy saw. Where it has limits, only STAY keeps within them.
    """
    limits, found = view.limits, {}
    is_limited = (limits.max_bytes, limits.max_receives, limits.max_layers) != (None, None, None)
    for name in getattr(policy, "filled_peers", ()):
        if is_limited and name != STAY:
            continue
        try:
            found[name] = PLACE_POLICIES.make(name)(view)
        except (MoestroError, ValueError):  # it cannot place on these devices
            continue
    return found


def cheapest_rows(
    view: PlaceView, found: Sequence[Rows], table_of: Callable[[Rows], ExpertTable], kept: Rows | None = None
) -> Rows:
    """Return the filled placement that is priced lowest, with its moves spread over the horizon.

    Args:
        view: Load, present placement, devices and prices.
        found: Placements; of equal ones the first is returned.
        table_of: Makes the table of a placement.
        kept: The placement to which layers return whose change does not pay; None means that all change.
    """
    horizon = max(view.limits.horizon_steps, 1.0)
    tables = [table_of(rows) for rows in found]
    least = [_step_s(view.load, table, view) + _least_move_s(table, view) / horizon for table in tables]
    best, cost, change = 0, math.inf, None
    # Moves take most of the time to find, so a placement that costs more without them is left out.
    for at in sorted(range(len(found)), key=lambda at: least[at]):
        if least[at] >= cost:
            break
        other = payback(view, tables[at])
        if other.after.step_s + other.move_s / horizon < cost:
            best, change, cost = at, other, other.after.step_s + other.move_s / horizon
    if kept is None or change is None:
        return found[best]
    stay = payback(view, table_of(kept))
    saved_s = stay.after.compute_s + stay.after.exchange_s - change.after.compute_s - change.after.exchange_s
    due_s = _move_s_by_layer(change, view) - _move_s_by_layer(stay, view)
    mixed = np.where((saved_s * horizon > due_s)[:, None], found[best], kept)
    after = payback(view, table_of(mixed))
    return mixed if after.after.step_s + after.move_s / horizon < cost else found[best]


def _least_move_s(table: ExpertTable, view: PlaceView) -> float:
    """Return the seconds in which the busiest device would receive its copies if all were near."""
    comes = (table.num_copies > 0) & (view.table.num_copies == 0) & view.devices.is_alive[:, None, None]
    most = int(comes.sum(axis=(1, 2)).max(initial=0))
    return most * view.prices.expert_bytes / max(view.prices.move_bytes_per_s[1:])


def _move_s_by_layer(change: Payback, view: PlaceView) -> NDArray[np.float64]:
    """Return float64[layers], seconds of each layer's moves, divided among the live devices."""
    seconds = each_move_s(change.moves, view.devices, view.prices) / max(int(view.devices.is_alive.sum()), 1)
    return np.bincount(change.moves.layer, seconds, view.load.tokens.shape[1]).astype(np.float64)


SHORT, LONG, FIRST = "short", "long", "first"
# Windows after which a finding counts half. Of short plans the newest ones decide, because domains change at once. Of
# the others several do: where two loads take turns, one window says only how the plan serves one of them.
HALF_LIFE = {SHORT: 1.0, LONG: 4.0, FIRST: 4.0}
# These and `LastingSettings` were chosen on seeds from 100 on of bench/simulator/placement_lasting.py.
MOST_FOUND = 16  # findings that are kept, the oldest of which hardly count
SPREAD = 0.03  # standard deviation of a finding
ERRORS = 1.0  # standard errors of their mean that are subtracted


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingSettings:
    """When a plan is followed.

    Attributes:
        least_share: Part of a step that a plan must be expected to save.
        num_windows: Windows that are remembered.
        half_life: Windows after which one counts half in the mean that a long plan is made for.
        hysteresis: Part by which the expected saving over the horizon must exceed the seconds of the move.
    """

    least_share: float = 0.02
    num_windows: int = 6
    half_life: float = 3.0
    hysteresis: float = 0.1


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
    _plans: dict[str, ExpertTable] = field(default_factory=dict)  # of the last call, by kind
    _found: dict[str, list[float]] = field(default_factory=dict)  # parts of a step that later windows found saved
    _base: ExpertTable | None = None  # beside which they were found
    _first: ExpertTable | None = None

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
        priced_s = _step_s(view.load, view.table, view)
        if not priced_s > 0:
            self.reason = "the window has no tokens"
            return view.table
        if self._windows and self._windows[-1].tokens.shape != view.load.tokens.shape:
            self._forget()
        self._judge(view, priced_s)
        self._plan(view)
        best, saved_s, kind = view.table, 0.0, ""
        for name, table in self._plans.items():
            net_s = priced_s * self._expected(name, view) - self._moves_s(view, table)
            if net_s > saved_s:
                best, saved_s, kind = table, net_s, name
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
        if kind == SHORT:  # the load is another one than before
            del self._windows[:-1]
        return replace(best, version=view.table.version + 1)

    def _forget(self) -> None:
        self._windows.clear()
        self._plans.clear()
        self._base = self._first = None

    def _judge(self, view: PlaceView, priced_s: float) -> None:
        """Let the window judge the plans of the last call, which have not seen it, beside the present placement."""
        if self._base is None or not np.array_equal(self._base.logical_of, view.table.logical_of):
            self._found, self._base = {}, view.table
        for kind, table in self._plans.items():
            if table.logical_of.shape == view.table.logical_of.shape:
                saved = 1 - _step_s(view.load, table, view) / priced_s
                self._found[kind] = [*self._found.get(kind, []), saved][-MOST_FOUND:]

    def _plan(self, view: PlaceView) -> None:
        """Make plans for the last window and for the mean of all; the first placement is one, too."""
        self._windows.append(replace(view.load, pairs=None))
        del self._windows[: -self.settings.num_windows]
        self._plans = {SHORT: self.policy(view)}
        if self._first is None or self._first.logical_of.shape != view.table.logical_of.shape:
            self._first = view.table
        else:
            self._plans[FIRST] = self._first
        if len(self._windows) > 1:
            load = replace(mean_load(self._windows, self._weights()), pairs=view.load.pairs)
            self._plans[LONG] = self.policy(replace(view, load=load))

    def _expected(self, kind: str, view: PlaceView) -> float:
        """Return the part of a step that a plan of the last call's kinds is expected to save."""
        found = self._found.get(kind, [])
        if found:
            weights = 0.5 ** (np.arange(len(found))[::-1] / HALF_LIFE[kind])
            return float(weights @ found / weights.sum() - ERRORS * SPREAD / math.sqrt(weights.sum()))
        if len(self._plans) > 1 or len(view.load.tokens) < 2:
            return 0.0
        # No window has judged a plan yet, so half of the sources judge one for the others.
        seen, unseen = _halves(view.load)
        present_s = _step_s(unseen, view.table, view)
        if not present_s:  # engines of the other half had no request
            return 0.0
        return 1 - _step_s(unseen, self.policy(replace(view, load=seen)), view) / present_s

    def _weights(self) -> np.ndarray:
        """Return float64[windows], weights of windows by their age and their steps; they sum to 1."""
        ages = np.arange(len(self._windows))[::-1]
        weights = 0.5 ** (ages / self.settings.half_life) * [max(each.num_steps, 1.0) for each in self._windows]
        return np.asarray(weights / weights.sum())

    def _moves_s(self, view: PlaceView, table: ExpertTable) -> float:
        """Return the seconds per step of the moves, spread over the horizon."""
        seconds = move_s(moves_between(view.table, table, view.devices), view.devices, view.prices)
        return (1 + self.settings.hysteresis) * seconds / max(view.limits.horizon_steps, 1.0)


def _step_s(load: ExpertLoad, table: ExpertTable, view: PlaceView) -> float:
    return score(load, table, view.devices, view.prices).step_s


def _halves(load: ExpertLoad) -> tuple[ExpertLoad, ExpertLoad]:
    """Return the load as if every second source sent what the one before it does, and the other way round."""
    even = np.arange(len(load.tokens)) // 2 * 2
    odd = np.minimum(even + 1, len(even) - 1)
    return replace(load, tokens=load.tokens[even]), replace(load, tokens=load.tokens[odd])


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
