"""Random histories of live placement: the loop, its control and a real migration, over workers that come and go.

Loads, answers and messages take random times. Policies, operators and deaths come at random.
"""

from __future__ import annotations

import contextlib
from collections import deque
from types import SimpleNamespace

import numpy as np
from support.expert_loads import PRICES
from support.moving_tables import random_target

from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import EMPTY, ExpertLayers, ExpertTable, TableMessage
from moestro.core.experts.layer_moves import MovingTable, moves_between, rounds_of
from moestro.flow.settings import GroupOptions
from moestro.placement.contract import PlaceLimits, PlacementError
from moestro.placement.live.control import Compute, EffectAnswer, PlacementControl, PlacementLoop, Trigger
from moestro.placement.live.ep_migration import EpMigration
from moestro.placement.live.plan import GroupView, PlaceableGroup, group_places
from moestro.placement.settings import LivePlacementSettings
from moestro.server.experts.coordinator import Coordinator
from moestro.server.experts.expert_signals import async_group
from moestro.web.errors import HttpError
from moestro.wire.messages import (
    DropLayer,
    ExpertsPlaced,
    Joined,
    LayerMoving,
    LayerSettled,
    Members,
    MoveLayer,
    PrepareExperts,
    Ready,
    TableServed,
)
from moestro.worker.peer_inbox import ExpertLoader

LAYERS = ExpertLayers(num_layers=4, layers=(0, 2, 3), num_experts=6)
SECOND = 10**9
EXPERT_BYTES = 10


class LockStepRanks:
    """Ranks of mode `ep`: messages arrive late, and the end of one ends all."""

    has_shares = True

    def __init__(self, rng, num_ranks: int = 3, num_slots: int = 3) -> None:
        self.rng, self.num_ranks, self.budget = rng, num_ranks, 0
        rows = np.full((num_ranks, LAYERS.num_layers, num_slots), EMPTY, np.int32)
        rows[:, :, :2] = np.arange(LAYERS.num_experts).reshape(num_ranks, 1, 2)
        self.most_bytes, self.num_deaths, self.down = 0, 0, 0
        self.inboxes: list[deque] = []
        self.migration = EpMigration(num_ranks, lambda rank, message: self.inboxes[rank].append(message))
        self._begin(TableMessage.of_table(LAYERS, ExpertTable(0, rows[:, LAYERS.layers], 6, np.ones(num_ranks, bool))))

    def group(self) -> PlaceableGroup:
        places = group_places(range(self.num_ranks), range(self.num_ranks))
        return PlaceableGroup(
            migration=self.migration,
            places=lambda: places,
            layers=lambda: self.migration.layers,
            is_complete=lambda: not self.down,
            has_shares=True,
        )

    def _begin(self, placed: TableMessage) -> None:
        self.inboxes = [deque() for _ in range(self.num_ranks)]
        self.tables = [MovingTable(placed.whole_table(), self._carrier) for _ in range(self.num_ranks)]
        first = self.tables[0]
        first.on_moved = lambda version, num_bytes: self.migration.on_message(0, LayerMoving(version, num_bytes))
        first.on_settled = lambda settled: self.migration.on_message(0, LayerSettled(settled))
        self.migration.on_message(0, ExpertsPlaced(first.placed(LAYERS.layers)))
        for rank in range(self.num_ranks):
            self.migration.on_message(rank, Ready(None))

    def _carrier(self, table, plan) -> SimpleNamespace:
        moves = moves_between(table.logical_of[:, plan.layer], plan.rows())
        rounds = deque(rounds_of(moves, self.num_ranks, max(plan.max_bytes_per_step // EXPERT_BYTES, 1)))
        carrier = SimpleNamespace(num_bytes=0, is_done=not rounds, commit=lambda: None, drop=lambda: None)

        def step() -> None:
            here = rounds.popleft()
            for column in (moves.source[here], moves.worker[here]):
                self.most_bytes = max(self.most_bytes, int(np.bincount(column).max()) * EXPERT_BYTES)
            carrier.num_bytes += int(moves.crosses[here].sum()) * EXPERT_BYTES
            carrier.is_done = not rounds

        carrier.step = step
        return carrier

    def turn(self, death_rate: float) -> None:
        if self.down:
            self.down -= 1
            if not self.down:
                self._begin(self.migration.placed)
            return
        if self.rng.random() < death_rate:
            self.num_deaths += 1
            self.down = int(self.rng.integers(1, 30))
            self.migration.ended(int(self.rng.integers(self.num_ranks)))
            return
        for inbox, table in zip(self.inboxes, self.tables, strict=True):
            while inbox and self.rng.random() < 0.7:
                match inbox.popleft():
                    case MoveLayer(plan):
                        table.take(plan)
                    case DropLayer(version):
                        table.cancel(version)
        gathered = np.stack([table.numbers() for table in self.tables])
        for table in self.tables:
            table.open_step(gathered)
        assert len({table.table.logical_of.tobytes() for table in self.tables}) == 1

    def check(self) -> None:
        """Between migrations, the ranks compute by the table that the server knows."""
        if not self.down and not self.migration.progress.is_running:
            served = self.tables[0].table.logical_of[:, LAYERS.layers]
            assert (served == self.migration.table.logical_of).all(), "the ranks have another table"

    def quiet(self) -> bool:
        return not self.down


class AsyncWorkers:
    """Homes and expert workers of mode `async` behind a real coordinator: they load, confirm, die and start again."""

    has_shares = False

    def __init__(self, rng) -> None:
        self.rng = rng
        self.options = GroupOptions(attention=2, experts=3)
        self.most_bytes, self.num_deaths = 0, 0
        self.sent: dict[int, deque] = {worker: deque() for worker in range(self.options.num_places)}
        self.coordinator = Coordinator(self.options, 60.0, lambda to, message: self.sent[to].append(message), 6)
        self.down: dict[int, int] = {}
        self.launches = dict.fromkeys(self.coordinator.present, 0)
        self.loaders: dict[int, ExpertLoader] = {}
        for worker in self.coordinator.present:
            self._start(worker)
        for worker in self.coordinator.present:
            self.coordinator.on_message(worker, Ready(None), 0)

    @property
    def migration(self):
        return self.coordinator.migration

    def group(self) -> PlaceableGroup:
        return async_group(self.coordinator, lambda _: "one machine")

    def _start(self, worker: int) -> None:
        self.sent[worker].clear()
        self.coordinator.launched(worker, self.launches[worker], 0)
        memory = SimpleNamespace(
            expert_bytes=EXPERT_BYTES,
            read=lambda layer, experts: list(experts),
            write=lambda *_: self.written.append(EXPERT_BYTES),
        )
        report = lambda message: self.coordinator.on_message(worker, message, 0)  # noqa: E731
        self.loaders[worker] = ExpertLoader(memory, lambda *_: self.rng.random() < 0.8, report)
        self.coordinator.on_message(worker, Joined(f"ipc://{worker}.{self.launches[worker]}", LAYERS), 0)

    def turn(self, death_rate: float) -> None:
        for worker in list(self.down):
            self.down[worker] -= 1
            if not self.down[worker]:
                del self.down[worker]
                self.launches[worker] += 1
                self._start(worker)
                self.coordinator.on_message(worker, Ready(None), 0)
        up = [worker for worker in self.coordinator.present if worker not in self.down]
        if self.rng.random() < death_rate:
            worker = int(self.rng.choice(up))
            self.num_deaths += 1
            self.down[worker] = int(self.rng.integers(1, 30))
            self.coordinator.ended(worker, "killed", 0)
            up.remove(worker)
        if death_rate and self.rng.random() < 0.02:
            with contextlib.suppress(HttpError):  # no other worker has one of its experts
                self.coordinator.drain(int(self.rng.integers(2, 5)), is_draining=bool(self.rng.random() < 0.5))
        for worker in up:
            self._work(worker)

    def _work(self, worker: int) -> None:
        while self.sent[worker] and self.rng.random() < 0.5:
            match self.sent[worker].popleft():
                case PrepareExperts() as message:
                    self.loaders[worker].begin(message)
                case Members(version=version) if worker < self.options.num_homes:
                    self.coordinator.on_message(worker, TableServed(version), 0)
        self.written: list[int] = []
        self.loaders[worker].step()
        self.most_bytes = max(self.most_bytes, sum(self.written))

    def check(self) -> None:
        """Do nothing: homes serve by the versions that they confirm."""

    def quiet(self) -> bool:
        if not self.down:
            for worker in range(2, 5):
                if self.coordinator.view(worker).is_draining:
                    self.coordinator.drain(worker, is_draining=False)
        return not self.down


class LiveHistory:
    """Live placement over one of these groups, with a random operator.

    Attributes:
        ends: (plan, deaths during its migration) of each that was completed.
    """

    def __init__(self, seed: int, workers_of=LockStepRanks, **flags) -> None:
        self.rng = np.random.default_rng(seed)
        self.workers, self.now_ns = workers_of(self.rng), 0
        self.budget = int(self.rng.integers(1, 60))
        given = {
            "placement_policy": "eplb",
            "placement_interval": int(self.rng.choice([0, 300])),
            "placement_drift": 0.05,
            "placement_payback_horizon": float(self.rng.choice([0.0, 1e6])),
            "placement_max_bytes_per_step": self.budget,
            **flags,
        }
        settings = LivePlacementSettings(**given)
        self.migration = self.workers.migration
        self.control = PlacementControl(self.migration, settings)
        self.view = GroupView(self.workers.group(), PRICES, PlaceLimits())
        self.steps, self._load = 0, None
        self.loop = PlacementLoop(self.control, self.view, self, 0)
        self.loop._decide = self._decide
        self.pending: list[tuple] = []
        self.num_started = self.num_most_running = 0
        self.triggers: set[Trigger] = set()
        real = self.migration.start

        def start(target: ExpertTable, max_bytes: int) -> None:
            was_running = self.migration.progress.is_running
            real(target, max_bytes)
            assert not was_running, "two migrations at once"
            self.num_started += 1
            self.base, self.target, self.deaths_before = self.migration.table, target, self.workers.num_deaths

        self.migration.start = start
        self.base = self.target = None
        self.deaths_before = 0

    # --- what the loop needs

    def num_steps(self) -> list[int]:
        return [self.steps] * len(self.view.group.places().sources)

    def load(self) -> ExpertLoad | None:
        return self._load

    def _decide(self, view) -> ExpertTable:
        """A policy that wants anything, and sometimes fails."""
        if self.rng.random() < 0.1:
            raise RuntimeError("a policy's own error")
        return random_target(self.rng, view.table)

    # --- a turn

    def turn(self, *, death_rate: float = 0.0, has_operator: bool = True) -> None:
        self.now_ns += int(self.rng.integers(1, SECOND // 2))
        self.steps += int(self.rng.integers(0, 20))
        self.workers.turn(death_rate)
        if (check := self.loop.on_time(self.now_ns)) is not None:
            self._begin(check)
        if self.pending and self.rng.random() < 0.7:
            self._answer(self.pending.pop(int(self.rng.integers(len(self.pending)))))
        if has_operator:
            self._operate()
        self._check()

    def _begin(self, procedure) -> None:
        with contextlib.suppress(StopIteration, PlacementError):
            self.pending.append((procedure, next(procedure)))

    def _answer(self, waiting: tuple) -> None:
        procedure, effect = waiting
        answer = EffectAnswer(self.now_ns)
        if isinstance(effect, Compute):
            try:
                answer = EffectAnswer(self.now_ns, effect.function())
            except Exception as error:
                answer = EffectAnswer(self.now_ns, error=error)
        elif self.rng.random() < 0.9:
            self._report()
        with contextlib.suppress(StopIteration, PlacementError):
            self.pending.append((procedure, procedure.send(answer)))

    def _report(self) -> None:
        shape = len(self.view.group.places().sources), len(LAYERS.layers), LAYERS.num_experts
        tokens = self.rng.gamma(0.5, 100.0, shape)
        self._load = ExpertLoad(tokens, np.zeros(shape[1:]), np.ones(shape[1:]), 100.0)

    def _operate(self) -> None:
        match int(self.rng.integers(60)):
            case 0 | 1:
                self.loop.cancel()
            case 2:
                self.control.freeze(is_frozen=self.rng.random() < 0.3)
            case 3 if not self.control.is_planning:
                self._begin(self.loop.plan("eplb", self.now_ns))
            case 4 if self.control.plan is not None:
                self.loop.apply(self.control.plan, Trigger.OPERATOR, self.now_ns)

    # --- laws

    def _check(self) -> None:
        control, progress = self.control, self.migration.progress
        if control.decision is not None:
            self.triggers.add(control.decision.trigger)
        assert self.num_started == control.num_migrations.total() + (control.active is not None)
        assert self.workers.most_bytes <= max(self.budget, EXPERT_BYTES), "bytes between two steps"
        self.workers.check()
        table = self.migration.table
        assert (table.num_copies.sum(axis=0) > 0).all(), "every expert has a copy"
        if self.target is None or progress.is_running:
            return
        if not progress.error:
            assert progress.num_committed == progress.num_layers
        if self.workers.num_deaths == self.deaths_before and control.active is None:
            self._check_layers(table, is_complete=not progress.error)

    def _check_layers(self, table: ExpertTable, *, is_complete: bool) -> None:
        """Every layer is the plan's or the former one; after the last commit all are the plan's."""
        held, base, target = (each.num_copies > 0 for each in (table, self.base, self.target))
        alive = table.is_alive & self.base.is_alive
        for layer in range(table.logical_of.shape[1]):
            is_new = (held[alive, layer] == target[alive, layer]).all()
            is_old = (held[alive, layer] == base[alive, layer]).all()
            assert is_new or (is_old and not is_complete), "a layer is neither the plan's nor the former one"

    def settle(self) -> None:
        """Without deaths and operators, what runs comes to an end."""
        self.loop._decide = lambda view: view.table
        for _ in range(600):
            self.turn(has_operator=False)
            if self.workers.quiet() and not self.migration.progress.is_running and self.control.active is None:
                return
        raise AssertionError(f"a migration neither commits nor ends: {self.migration.progress}")
