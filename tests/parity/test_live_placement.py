"""One recorded load under the server's driver and the simulator's: equal triggers, decisions, moves and commits.

The server's side is its driver, its reports and its messages, with a rank's end of the socket that keeps virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.expert_loads import PRICES as FAST_PRICES
from support.virtual_loop import run_virtually

from moestro.core.experts.expert_table import ExpertTable
from moestro.core.experts.layer_moves import LayerPlan, MovingTable, moves_between, rounds_of
from moestro.placement.contract import PlaceLimits, even_devices
from moestro.placement.live.control import DecisionOutcome, PlacementControl, Trigger
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.plan import GroupView
from moestro.placement.settings import ExpertLoadSettings, LivePlacementSettings
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.server.experts import live_placement
from moestro.server.experts.expert_signals import lock_step_group
from moestro.server.experts.live_placement import PlacementDriver
from moestro.sim.groups.live_placement import PlacementSite, SimPlacement, SimPlacementSettings, with_spare_slots
from moestro.wire.messages import (
    DropLayer,
    ExpertsPlaced,
    LayerMoving,
    LayerSettled,
    MoveLayer,
    ReadExperts,
    Ready,
    decode_from_rank,
    decode_to_rank,
    encode,
)
from moestro.worker.rank_builder import ExpertCollection

NUM_LAYERS, EXPERT_LAYERS, NUM_EXPERTS, NUM_RANKS = 5, (1, 2, 4), 12, 3
NUM_SPARES = 2
LIMITS = PlaceLimits(horizon_steps=1e5)
# Before them an operator cancels what runs, and both loops look once more (every 2 s): these records end with nothing
# open, because no plan begins in their last steps.
LAST_STEPS = 80
# A hundredth of the usual speed: the experts' work is most of a step of the record.
PRICES = replace(FAST_PRICES, token_s=1e-5, row_s=(0.0, 1.4e-6, 2.8e-5))


@dataclass(frozen=True)
class Record:
    """Steps of a group: int64[steps, ranks, layers, experts] tokens, and ns without waits. And what an operator does.

    `cancels`: steps before which an operator cancels what runs.
    """

    counts: np.ndarray
    step_ns: list[int]
    cancels: set[int]


def record_of(seed: int, num_steps: int = 900) -> Record:
    """A load whose popular experts change twice."""
    rng = np.random.default_rng(seed)
    shares = np.concatenate([
        np.repeat([rng.dirichlet(np.full(NUM_EXPERTS, 0.4), NUM_LAYERS)], num_steps // 3, axis=0) for _ in range(3)
    ])  # fmt: skip
    counts = rng.poisson(400 * shares[:, None], (num_steps, NUM_RANKS, NUM_LAYERS, NUM_EXPERTS))
    counts[:, :, [layer for layer in range(NUM_LAYERS) if layer not in EXPERT_LAYERS]] = 0
    step_ns = rng.integers(10_000_000, 60_000_000, num_steps).tolist()
    return Record(counts, step_ns, {*rng.integers(100, num_steps, 60).tolist(), num_steps - LAST_STEPS})


def settings_of(**flags) -> LivePlacementSettings:
    given = {"placement_policy": "moestro", "placement_interval": 150, "placement_max_bytes_per_step": 1, **flags}
    return LivePlacementSettings(**given)


def first_table() -> ExpertTable:
    rows = np.arange(NUM_EXPERTS, dtype=np.int32).reshape(NUM_RANKS, 1, -1).repeat(NUM_LAYERS, axis=1)
    return with_spare_slots(ExpertTable(0, rows, NUM_EXPERTS, np.ones(NUM_RANKS, np.bool_)), NUM_SPARES)


@dataclass
class Diary:
    """What happened, each with its step."""

    decisions: list = field(default_factory=list)
    moves: list = field(default_factory=list)
    commits: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    tables: list = field(default_factory=list)
    migrations: dict = field(default_factory=dict)

    def look(self, control: PlacementControl) -> None:
        """Write down the last decision, if it is new."""
        decision, plan = control.decision, control.plan
        if decision is None or (self.decisions and self.decisions[-1] == decision):
            return
        self.decisions.append(decision)
        if decision.outcome is DecisionOutcome.STARTED:
            columns = (plan.moves.layer, plan.moves.expert, plan.moves.target)
            self.moves.append(list(zip(*(column.tolist() for column in columns), strict=True)))

    def end(self, control: PlacementControl) -> Diary:
        self.migrations = dict(control.num_migrations)
        self.tables.append(control.migration.table.logical_of.tolist())
        return self


# --- the simulator ----------------------------------------------------------------------------------------------------


def in_simulator(record: Record, settings: LivePlacementSettings, check_s: float = 2.0) -> Diary:
    site = PlacementSite(
        devices=even_devices(NUM_RANKS, NUM_EXPERTS // NUM_RANKS + NUM_SPARES), prices=PRICES, limits=LIMITS
    )
    placement = SimPlacement(
        first_table(), EXPERT_LAYERS, site, SimPlacementSettings(live=settings, check_ns=round(check_s * 1e9))
    )
    diary, now_ns, on_settled = Diary(), 0, placement.moves.on_settled
    step = 0

    def settled(found) -> None:
        diary.commits.append((step, now_ns, found.version, found.is_committed, found.num_bytes))
        on_settled(found)

    placement.moves.on_settled = settled
    for step, counts in enumerate(record.counts):
        if step in record.cancels:
            diary.cancelled.append(placement.loop.cancel().name != "NOTHING")
        waits_ns = placement.turn(now_ns)
        diary.waits.append(waits_ns)
        diary.look(placement.control)
        placement.observe(counts)
        now_ns += waits_ns + record.step_ns[step]
    return diary.end(placement.control)


# --- the server -------------------------------------------------------------------------------------------------------


class Carrier:
    """Moves of one layer in one rank, by the arithmetic of the real one; the slowest receiver ends a round."""

    def __init__(self, table: ExpertTable, plan: LayerPlan) -> None:
        self.moves = moves_between(table.logical_of[:, plan.layer], plan.rows())
        self.rounds = rounds_of(self.moves, NUM_RANKS, max(plan.max_bytes_per_step // PRICES.expert_bytes, 1))
        self.num_bytes = self.num_done = 0
        self.last_s = 0.0

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.rounds)

    def step(self) -> None:
        received = np.zeros(NUM_RANKS)
        for move in self.rounds[self.num_done].tolist():
            is_far = self.moves.source[move] != self.moves.worker[move]
            received[self.moves.worker[move]] += PRICES.expert_bytes / PRICES.move_bytes_per_s[int(is_far)]
            self.num_bytes += PRICES.expert_bytes * bool(is_far)
        self.last_s = received.max()
        self.num_done += 1

    def commit(self) -> None:
        self.num_done = len(self.rounds)

    drop = commit


class Ranks:
    """The ranks' ends of their sockets: they read between two steps, and agree in each handshake."""

    def __init__(self, record: Record, diary: Diary) -> None:
        self.record, self.diary, self.step = record, diary, 0
        self.inboxes: list[list] = [[] for _ in range(NUM_RANKS)]
        self.collections = [ExpertCollection(ExpertLoadSettings()) for _ in range(NUM_RANKS)]
        self.carriers: list[Carrier] = []
        self.tables = [MovingTable(first_table(), self._begin) for _ in range(NUM_RANKS)]
        self.migration = EpMigration(NUM_RANKS, self.send)
        self._report(ExpertsPlaced(self.tables[0].placed(EXPERT_LAYERS)))
        for rank in range(NUM_RANKS):
            self.migration.on_message(rank, Ready(None))
        self.tables[0].on_moved = lambda version, num_bytes: self._report(LayerMoving(version, num_bytes))
        self.tables[0].on_settled = self._settled
        self.loads = ExpertLoads(NUM_RANKS, self.ask)

    def send(self, rank: int, message) -> None:
        self.inboxes[rank].append(decode_to_rank(encode(message)))

    def ask(self, rank: int, question: ReadExperts) -> bool:
        self.send(rank, question)
        return True

    def _begin(self, table: ExpertTable, plan: LayerPlan) -> Carrier:
        self.carriers.append(Carrier(table, plan))
        return self.carriers[-1]

    def _report(self, message) -> None:
        self.migration.on_message(0, decode_from_rank(encode(message)))

    def _settled(self, found) -> None:
        now_ns = asyncio.get_running_loop().now_ns()
        self.diary.commits.append((self.step, now_ns, found.version, found.is_committed, found.num_bytes))
        self._report(LayerSettled(found))

    def open_step(self, now_ns: int) -> int:
        """Read the inboxes, meet the others, and return the ns for which the step waits."""
        for rank, inbox in enumerate(self.inboxes):
            messages = inbox.copy()
            inbox.clear()
            for message in messages:
                match message:
                    case ReadExperts():
                        report = decode_from_rank(encode(self.collections[rank].report(message)))
                        self.loads.on_message(rank, report, now_ns)
                    case MoveLayer(plan):
                        self.tables[rank].take(plan)
                    case DropLayer(version):
                        self.tables[rank].cancel(version)
        for carrier in self.carriers:
            carrier.last_s = 0.0
        gathered = np.stack([table.numbers() for table in self.tables])
        for table in self.tables:
            table.open_step(gathered)
        return round(max((carrier.last_s for carrier in self.carriers), default=0.0) * 1e9)

    async def run(self, driver: PlacementDriver) -> None:
        loop = asyncio.get_running_loop()
        end_ns = loop.now_ns()
        for step, counts in enumerate(self.record.counts):
            self.step = step
            if self.step in self.record.cancels:
                self.diary.cancelled.append(driver.cancel())
            waits_ns = self.open_step(end_ns)
            self.diary.waits.append(waits_ns)
            for collection, own in zip(self.collections, counts, strict=True):
                collection.observe(SimpleNamespace(expert_counts=own, expert_choices=None))
            end_ns += waits_ns + self.record.step_ns[self.step]
            while loop.now_ns() < end_ns:
                await asyncio.sleep((end_ns - loop.now_ns()) / 1e9)
                self.diary.look(driver.control)


def in_server(record: Record, settings: LivePlacementSettings) -> Diary:
    async def serve() -> Diary:
        diary = Diary()
        ranks = Ranks(record, diary)
        group = lock_step_group(ranks.migration, NUM_RANKS, SimpleNamespace(is_routable=lambda _: True))
        view = GroupView(group, PRICES, LIMITS)
        control = PlacementControl(ranks.migration, settings)
        driver = PlacementDriver(control, view, ranks.loads, asyncio.get_running_loop().now_ns)
        async with driver.running():
            await ranks.run(driver)
        return diary.end(control)

    return run_virtually(serve())


def run_at_once(target, name: str, daemon: bool) -> SimpleNamespace:
    """Stands in for `threading.Thread`."""
    return SimpleNamespace(start=target)


@pytest.fixture(autouse=True)
def plans_at_once(monkeypatch):
    """Virtual time does not pass while a thread computes."""
    monkeypatch.setattr(live_placement.threading, "Thread", run_at_once)


@pytest.mark.parametrize(
    ("flags", "trigger"),
    [
        ({}, Trigger.INTERVAL),
        ({"placement_policy": "eplb", "placement_payback_horizon": 0.0}, Trigger.INTERVAL),
        ({"placement_interval": 0, "placement_drift": 0.02, "placement_max_bytes_per_step": 10**9}, Trigger.DRIFT),
        ({"placement_policy": "eplb", "placement_payback_horizon": 1e-9}, Trigger.INTERVAL),
    ],
    ids=["moestro", "eplb", "drift", "never-pays"],
)
@pytest.mark.parametrize("seed", range(2))
def test_the_simulator_places_what_the_server_places(seed, flags, trigger):
    record, settings = record_of(seed), settings_of(**flags)
    server, simulator = in_server(record, settings), in_simulator(record, settings)
    assert any(decision.trigger is trigger for decision in server.decisions)
    assert simulator.decisions == server.decisions, "time, steps, trigger, outcome and its figures"
    assert simulator.moves == server.moves
    assert simulator.commits == server.commits
    assert simulator.waits == server.waits
    assert simulator.cancelled == server.cancelled
    assert simulator.migrations == server.migrations
    assert simulator.tables == server.tables
    outcomes = {decision.outcome for decision in server.decisions}
    if flags.get("placement_payback_horizon"):
        assert DecisionOutcome.DOES_NOT_PAY in outcomes
        assert DecisionOutcome.STARTED not in outcomes
    else:
        assert DecisionOutcome.STARTED in outcomes
        assert len(server.commits) > 2


def test_a_simulator_that_reads_the_load_at_other_times_differs():
    record, settings = record_of(0), settings_of()
    server, other = in_server(record, settings), in_simulator(record, settings, check_s=1.7)
    assert other.decisions != server.decisions
    assert other.commits != server.commits


def test_the_record_has_migrations_that_an_operator_cancels():
    found = in_server(record_of(0), settings_of())
    assert any(found.cancelled)
    assert any(not is_committed for _, _, _, is_committed, _ in found.commits)
