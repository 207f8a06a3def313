"""Live placement of a simulated group: the server's control and migration, over ranks that move weights at a price.

The control of `placement.live` decides when to plan and what to follow, and its migration sends layers to the ranks.
Only what surrounds them is simulated: the clock, the policy's thread, the messages, and the exchange of weights. For
Gimbal v1, which runs random tokens before it serves, the control begins with the load of what they visit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_load import ExpertLoad, LayerPairs, SourceLoad, expert_pressures, merge_sources
from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.experts.layer_moves import LayerPlan, MovingTable, moves_between, rounds_of
from moestro.core.work import request_key, token_keys
from moestro.cost.gate import Gate
from moestro.placement.contract import PLACE_POLICIES, Devices, PlaceLimits, PlacePrices, PlaceView
from moestro.placement.live.control import (
    CHECK_NS,
    Compute,
    DecisionOutcome,
    Effect,
    EffectAnswer,
    PlacementControl,
    PlacementDecision,
    PlacementLoop,
    Procedure,
)
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.plan import GroupPlaces, GroupView, PlaceableGroup, PlacementPlan
from moestro.placement.load_window import LoadWindow, PairWindow
from moestro.placement.policies.gimbal import GimbalV1Placement
from moestro.placement.score import Moves, move_s
from moestro.placement.settings import LivePlacementSettings
from moestro.wire.messages import DropLayer, ExpertsPlaced, LayerMoving, LayerSettled, MoveLayer, Ready, ToRank

Int64s = NDArray[np.int64]

# Steps between two computations of expert pressure. The window changes by 1 - 2**(-32 / 1000) = 2 % meanwhile.
_PRESSURE_INTERVAL = 32
UNBOUNDED_BYTES = 1 << 60  # A budget that no layer exceeds.


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPlacementSettings:
    """When a simulated group plans its placement anew, and how weights move.

    Attributes:
        live: the server's settings.
        first_steps: steps before the first plan. None means the interval; vLLM plans first after a quarter of it.
        half_life_steps: steps after which a counted step counts half in the window. vLLM's window has 1000 steps.
        is_synchronous: whether one step waits for a whole migration, as with vLLM's synchronous EPLB.
        check_ns: time between two readings of the load.
    """

    live: LivePlacementSettings
    first_steps: int | None = None
    half_life_steps: float = 1000.0
    is_synchronous: bool = False
    check_ns: int = CHECK_NS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementSite:
    """The devices of a group, and what work and moves cost there.

    Attributes:
        devices: devices; each slot of the group's table is theirs.
        prices: prices that the policy sees, and those of moves.
        limits: bounds on one change. Its horizon should be the interval between two plans.
        offline_pairs: pairs of experts of an offline run, for policies that need them (Gimbal v1). None means none.
    """

    devices: Devices
    prices: PlacePrices
    limits: PlaceLimits
    offline_pairs: LayerPairs | None = None

    def places(self) -> GroupPlaces:
        """Return the devices as the control sees them: all of them hold experts."""
        node_of, source_on = self.devices.node_of, self.devices.source_on
        return GroupPlaces(
            holders=np.arange(self.devices.num_devices),
            sources=tuple(source_on.tolist()),
            holder_machines=node_of,
            source_machines=node_of[source_on],
            speeds=self.devices.speed,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SimDecision:
    """One decision about the placement.

    Attributes:
        decision: the decision.
        plan: what it was about. None means that the policy had no plan.
    """

    decision: PlacementDecision
    plan: PlacementPlan | None

    @property
    def num_moves(self) -> int:
        """Copies that devices receive, where the plan is followed."""
        is_followed = self.decision.outcome is DecisionOutcome.STARTED
        return len(self.plan.moves) if is_followed and self.plan is not None else 0

    @property
    def balance_found(self) -> float | None:
        """Mean over largest load of the window, under the placement that served it (vLLM's definition)."""
        change = None if self.plan is None else self.plan.change
        return None if change is None else change.before.balance_of_sums


class SimPlacement:
    """Live placement of one group.

    A question about loads is answered at the end of the step in which it comes, as a rank answers between two steps.
    A layer gets its new table once all its weights have arrived; until then the old copies serve. The policy's own
    time is not priced: it runs on the host beside the steps.

    Args:
        table: placement of the first step, over all layers of the network; slots beyond a device's share are EMPTY.
        layers: layers of the network with experts.
        site: devices and prices.
        settings: interval, window and budget.

    Attributes:
        decisions: all decisions so far.
        stall_ns: time for which steps have waited for weights.
        moved_bytes: weights that went from one device to another.
        expert_pressure: float64[sources], as `core.experts.expert_load` defines it, of the visits in each source's
            window.
    """

    def __init__(
        self, table: ExpertTable, layers: tuple[int, ...], site: PlacementSite, settings: SimPlacementSettings
    ) -> None:
        num_ranks, live = len(site.devices.source_on), settings.live
        self._site, self._settings, self._num_ranks = site, settings, num_ranks
        self._loads = _SourceLoads(num_ranks, table, settings.half_life_steps, site.offline_pairs)
        self.moves = MovingTable(table, self._begin_layer)
        self.moves.on_moved = lambda version, num_bytes: self.migration.on_message(0, LayerMoving(version, num_bytes))
        self.moves.on_settled = lambda settled: self.migration.on_message(0, LayerSettled(settled))
        self.migration = EpMigration(num_ranks, self._send)
        self.migration.on_message(0, ExpertsPlaced(self.moves.placed(layers)))
        for rank in range(num_ranks):
            self.migration.on_message(rank, Ready(None))
        first_steps = live.placement_interval if settings.first_steps is None else settings.first_steps
        self.control = PlacementControl(self.migration, live, live.placement_interval - first_steps)
        places = site.places()
        group = PlaceableGroup(
            migration=self.migration,
            places=lambda: places,
            layers=lambda: layers,
            is_complete=lambda: True,
            has_shares=True,
        )
        view = GroupView(group, site.prices, site.limits)
        self.loop = PlacementLoop(self.control, view, self._loads, 0, settings.check_ns)
        self.decisions: list[SimDecision] = []
        self.stall_ns = self.moved_bytes = 0
        self.expert_pressure = np.ones(num_ranks)
        self._inbox: list[MoveLayer | DropLayer] = []  # of every rank
        self._questions: list[Procedure[None]] = []  # that wait for the loads
        self._waits_s = 0.0
        self._plan: PlacementPlan | None = None  # of the last decision

    @property
    def table(self) -> ExpertTable:
        """Placement of the next step."""
        return self.moves.table

    def turn(self, now_ns: int) -> int:
        """Do what comes before a step that begins now, and return the time for which it waits for weights, ns."""
        while self.loop.next_ns <= now_ns:
            at_ns = self.loop.next_ns
            if (check := self.loop.on_time(at_ns)) is not None:
                self._run(check, None, at_ns)
        self._read_inbox()
        questions, self._questions = self._questions, []
        if questions:
            self._loads.report()
        for procedure in questions:
            self._run(procedure, EffectAnswer(now_ns), now_ns)
        return self._open_step()

    def wake_ns(self, now_ns: int) -> int | None:
        """Return when a group without tokens takes its next turn. None means when tokens come."""
        if self._questions or self._inbox or self.moves.is_moving:
            return now_ns
        if self._loads.has_news or self.control.due() is not None:
            return max(self.loop.check_ns, now_ns)
        return self.loop.watch_ns if self.control.is_busy else None

    def observe(self, counts: Int64s) -> None:
        """Take in a step's tokens, int64[sources, layers, experts]."""
        if self._loads.observe(counts) % _PRESSURE_INTERVAL == 0:
            self.expert_pressure = expert_pressures(self._loads.visits(), self.table.parts)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(self, rank: int, message: ToRank) -> None:
        """Deliver a message of the migration, which is the same to all ranks, before their next step."""
        if rank == 0:
            assert isinstance(message, MoveLayer | DropLayer), "the migration sends nothing else"
            self._inbox.append(message)

    def _read_inbox(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            if isinstance(message, MoveLayer):
                self.moves.take(message.plan)
            else:
                self.moves.cancel(message.version)

    def _run(self, procedure: Procedure[None], answer: EffectAnswer | None, now_ns: int) -> None:
        """Run a procedure until it wants the loads or has ended. What it computes takes no time."""
        try:
            effect: Effect = next(procedure) if answer is None else procedure.send(answer)
            while isinstance(effect, Compute):
                effect = procedure.send(_computed(effect, now_ns))
        except StopIteration:
            self._note_decision()
        else:
            self._questions.append(procedure)

    def _note_decision(self) -> None:
        decision, plan = self.control.decision, self.control.plan
        if decision is not None and not (self.decisions and self.decisions[-1].decision is decision):
            self.decisions.append(SimDecision(decision, None if plan is self._plan else plan))
            self._plan = plan

    # --- steps ------------------------------------------------------------------------------------------------------

    def _open_step(self) -> int:
        self._waits_s = 0.0
        self._meet()
        while self._settings.is_synchronous and self.migration.progress.is_running:
            self._read_inbox()
            self._meet()
        waits_ns = round(self._waits_s * NS_PER_S)
        self.stall_ns += waits_ns
        return waits_ns

    def _meet(self) -> None:
        """Let the ranks agree on moves in the handshake of a step. All of them know the same, so one stands for all."""
        if self.migration.progress.is_running:
            self.moves.open_step(np.tile(self.moves.numbers(), (self._num_ranks, 1)))

    def _begin_layer(self, table: ExpertTable, plan: LayerPlan) -> _PricedLayer:
        return _PricedLayer(table, plan, self._site, self._moved)

    def _moved(self, seconds: float, num_bytes: int) -> None:
        self._waits_s += seconds
        self.moved_bytes += num_bytes


class _PricedLayer:
    """Moves of one layer at a price; implements `core.experts.layer_moves.LayerCarrier`.

    Args:
        on_moved: called for each round with its seconds, and the bytes that went from one worker to another.
    """

    def __init__(
        self, table: ExpertTable, plan: LayerPlan, site: PlacementSite, on_moved: Callable[[float, int], None]
    ) -> None:
        self._moves = moves_between(table.logical_of[:, plan.layer], plan.rows())
        per_round = max(plan.max_bytes_per_step // site.prices.expert_bytes, 1)
        self._rounds = rounds_of(self._moves, len(table.logical_of), per_round)
        self._site, self._on_moved = site, on_moved
        self._num_done = self.num_bytes = 0

    @property
    def is_done(self) -> bool:
        return self._num_done == len(self._rounds)

    def step(self) -> None:
        moves, here = self._moves, self._rounds[self._num_done]
        columns = (np.zeros(len(here), np.int64), moves.expert[here], moves.source[here], moves.worker[here])
        layer, expert, source, target = (column.astype(np.int32) for column in columns)
        seconds = move_s(Moves(layer, expert, source, target), self._site.devices, self._site.prices)
        num_bytes = int(moves.crosses[here].sum()) * self._site.prices.expert_bytes
        self.num_bytes += num_bytes
        self._num_done += 1
        self._on_moved(seconds, num_bytes)

    def commit(self) -> None:
        """Do nothing: the table has the placement."""

    def drop(self) -> None:
        """Do nothing, as `commit`."""


class _SourceLoads:
    """Windows of all ranks, and what they reported last; implements `placement.live.loop.KnownLoads`."""

    def __init__(self, num_ranks: int, table: ExpertTable, half_life: float, pairs: LayerPairs | None) -> None:
        num_layers, num_experts = table.logical_of.shape[1], table.num_experts
        self._windows = [LoadWindow(num_layers, num_experts, half_life) for _ in range(num_ranks)]
        self._pairs = pairs
        self._reports: list[SourceLoad] = []
        self._load: ExpertLoad | None = None

    @property
    def has_news(self) -> bool:
        """Whether a step came since the last report."""
        return sum(window.num_steps for window in self._windows) > sum(self.num_steps())

    def observe(self, counts: Int64s) -> int:
        """Take in a step, and return the steps before it."""
        num_steps = self._windows[0].num_steps
        for window, own in zip(self._windows, counts, strict=True):
            window.observe(own)
        return num_steps

    def visits(self) -> NDArray[np.float64]:
        """float64[sources, layers, experts], decayed visits in each window."""
        return np.stack([load.mean * load.weight for load in self._current()])

    def report(self) -> None:
        """Make the loads of all windows those that policies see from now on."""
        self._reports = self._current()
        merged = merge_sources(self._reports)
        self._load = None
        if merged is not None and len(merged[1]):  # Otherwise no token came yet.
            self._load = replace(merged[0], pairs=self._pairs)

    def num_steps(self) -> list[int]:
        return [report.num_steps for report in self._reports]

    def load(self) -> ExpertLoad | None:
        return self._load

    def _current(self) -> list[SourceLoad]:
        return [window.load() for window in self._windows]


def _computed(effect: Compute, now_ns: int) -> EffectAnswer:
    try:
        return EffectAnswer(now_ns, effect.function())
    except Exception as error:  # The procedure judges it, as where a server's thread raises it.
        return EffectAnswer(now_ns, error=error)


def with_spare_slots(table: ExpertTable, num_spares: int) -> ExpertTable:
    """Return a table with further slots on each worker, which are EMPTY."""
    spare = np.full((*table.logical_of.shape[:2], num_spares), EMPTY, np.int32)
    return ExpertTable(
        table.version, np.concatenate([table.logical_of, spare], axis=2), table.num_experts, table.is_alive
    )


_NUM_TOKENS = 512
_REQUEST = 1 << 31  # whose tokens they are; no request of a load has this number


@dataclass(frozen=True, slots=True, eq=False)
class OfflineRouting:
    """Experts of random tokens.

    Attributes:
        choices: int32[layers, tokens, chosen], experts of each token.
        num_experts: experts of a layer.
    """

    choices: NDArray[np.int32]
    num_experts: int

    @classmethod
    def drawn(cls, gate: Gate, num_layers: int, num_experts: int) -> OfflineRouting:
        """Draw the experts of random tokens from the gate of the load."""
        one = np.ones(1, np.int32)
        keys = token_keys(np.array([request_key(_REQUEST)], np.uint64), 0 * one, _NUM_TOKENS * one)
        return cls(gate.choose_layers(keys, range(num_layers)).swapaxes(0, 1), num_experts)

    def pairs(self) -> LayerPairs | None:
        """Count the pairs of experts of consecutive layers; None with a single layer."""
        window = PairWindow(self.num_experts)
        window.add(self.choices, self.choices.shape[1], 1.0)
        return window.most_frequent(1.0)

    def load(self, num_sources: int) -> ExpertLoad:
        """Count the tokens of each expert, as one step whose sources are alike."""
        num_experts = self.num_experts
        counts = np.array([np.bincount(layer.ravel(), minlength=num_experts) for layer in self.choices], np.float64)
        tokens = np.repeat(counts[None] / num_sources, num_sources, axis=0)
        return ExpertLoad(tokens, np.zeros_like(counts), (counts > 0).astype(np.float64), 1.0, self.pairs())


def start_placement(
    gate: Gate,
    table: ExpertTable,
    layers: tuple[int, ...],
    site: PlacementSite,
    settings: SimPlacementSettings,
) -> SimPlacement:
    """Make the live placement of a group.

    Gimbal v1 gets the pairs of an offline run, and places the experts by it before the first step.

    Args:
        gate: draws the experts of the load.
        table: experts in order, with EMPTY spare slots.
        layers: layers with experts; Gimbal v1 needs that all of them have.
        site: devices and prices.
        settings: policy, interval, window and budget.

    Raises:
        ConfigError: no policy has the name, or a setting is wrong.
    """
    policy = PLACE_POLICIES.make(settings.live.placement_policy)
    if isinstance(policy, GimbalV1Placement):
        offline = OfflineRouting.drawn(gate, table.logical_of.shape[1], table.num_experts)
        site = replace(site, offline_pairs=offline.pairs())
        load = offline.load(len(site.devices.source_on))
        table = policy(PlaceView(load, table, site.devices, site.prices, site.limits))
    return SimPlacement(table, layers, site, settings)
