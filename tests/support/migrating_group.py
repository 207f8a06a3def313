"""A group of workers over integers whose experts move: a real coordinator, real inboxes, and links with moods.

Messages between the coordinator and the workers arrive late. Workers with experts alone die and start again, and then
have what they loaded at that start. A slot that nothing was loaded into computes nonsense.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
from support.fake_device import make_request
from support.fake_group import IS_SPARSE, NUM_EXPERTS, FakeGroup
from support.fake_stages import VOCAB, FakeStages

from moestro.core.experts.expert_table import EMPTY, ExpertLayers, ExpertTable
from moestro.flow.executor import FlowExecutor
from moestro.flow.policies.one_queue import in_order
from moestro.flow.settings import GroupOptions
from moestro.flow.token_pool import THERE
from moestro.placement.live.async_migration import AsyncMigration
from moestro.server.experts.coordinator import Coordinator
from moestro.wire.messages import Joined, Ready
from moestro.worker.peer_inbox import PeerInbox

LAYERS = tuple(layer for layer, is_sparse in enumerate(IS_SPARSE) if is_sparse)
EXPERTS = ExpertLayers(num_layers=len(IS_SPARSE), layers=LAYERS, num_experts=NUM_EXPERTS)


class Channel:
    """The end of a worker's connection to the coordinator."""

    num_steps = 0
    owes = False

    def __init__(self, group: MigratingGroup, worker: int) -> None:
        self._group, self._worker = group, worker
        self.arrived: deque = deque()

    def now_ns(self) -> int:
        return self._group.now_ns

    def has_messages(self) -> bool:
        return bool(self.arrived)

    def receive(self, wait_s: float | None) -> list:
        messages, self.arrived = list(self.arrived), deque()
        return messages

    def send(self, message) -> None:
        self._group.to_server[self._worker].append(message)


class PeerConnections:
    """Knows which process of each worker a worker sends to; messages to another one are lost."""

    num_notices = num_sent = 0

    def __init__(self, group: MigratingGroup, worker: int) -> None:
        self._group, self._worker = group, worker
        self.to_resend: set[int] = set()
        self.launches: dict[int, int] = {}

    def connect(self, worker: int, address: str, launch: int) -> None:
        self.disconnect(worker)
        self.launches[worker] = launch

    def disconnect(self, worker: int) -> None:
        self._group.channels[self._worker, worker].clear()
        self.launches.pop(worker, None)

    def receive(self, now_ns: int) -> list:
        return []

    def find_breaks(self) -> None:
        pass


class Memory:
    """The slots of a fake device."""

    expert_bytes = 10

    def __init__(self, device: FakeStages) -> None:
        self._device = device

    def read(self, layer: int, experts) -> list[int]:
        assert IS_SPARSE[layer]
        return list(experts)

    def write(self, layer: int, slot: int, expert: int, weights: int) -> None:
        assert weights == expert
        self._device.logical_of[layer, slot] = expert


class MigratingGroup(FakeGroup):
    """Homes and workers with experts. `death_rate`: chance of a death in each turn."""

    def __init__(self, rng, options: GroupOptions, num_redundant: int, *, death_rate: float = 0.0, **settings) -> None:
        self.to_worker: dict[int, deque] = {worker: deque() for worker in range(options.num_places)}
        self.to_server: dict[int, deque] = {worker: deque() for worker in range(options.num_places)}
        self.now_ns, self.death_rate, self.num_deaths = 0, death_rate, 0
        self.launches = [0] * options.num_places
        self.down: dict[int, int] = {}  # workers without a process, and the turns until the next one starts
        self.coordinator = Coordinator(options, 60.0, lambda to, text: self.to_worker[to].append(text), num_redundant)
        for worker in range(options.num_places):
            self.coordinator.launched(worker, 0, 0)
            self.coordinator.on_message(worker, Joined(f"ipc://{worker}.0", EXPERTS), 0)
        members = self.coordinator.members()
        super().__init__(rng, options.num_homes, members.table.whole_table(), lambda _: in_order, **settings)
        self.inboxes: list[PeerInbox] = []
        for worker in range(options.num_places):
            self.inboxes.append(self._join(worker))
            self.coordinator.on_message(worker, Ready(None), 0)

    @property
    def migration(self) -> AsyncMigration:
        return self.coordinator.migration

    def _join(self, worker: int) -> PeerInbox:
        """A worker's process takes up its work, with the first description of the group."""
        spec = self.coordinator.spec(worker)
        device = self.devices[worker]
        device.may_forget, device.logical_of = True, device.logical_of.copy()  # not the table's own memory
        links = PeerConnections(self, worker)
        channel = Channel(self, worker)
        inbox = PeerInbox(spec, channel, links, Memory(device) if spec.has_experts else None)
        channel.arrived, self.to_worker[worker] = self.to_worker[worker], deque()  # and what comes with it
        inbox._take_in()
        inbox.use(self.executors[worker])
        return inbox

    # --- life of workers --------------------------------------------------------------------------------------------

    def kill(self, worker: int) -> None:
        """End the process of a worker with experts alone; another one starts later."""
        assert worker >= self.num_homes
        self.num_deaths += 1
        old = self.devices[worker]
        device = FakeStages(old.shape, 64, 4, old.piece_ns)
        device.num_logical, device.may_forget = NUM_EXPERTS, True
        device.logical_of = np.full_like(old.logical_of, EMPTY)
        device.executed = old.executed
        core = self.executors[worker]._core
        self.devices[worker] = device
        self.executors[worker] = FlowExecutor(device, in_order, 1, core._peers, self.executors[worker]._links)
        self.to_worker[worker].clear()
        self.to_server[worker].clear()
        self.launches[worker] += 1
        self.down[worker] = int(self.rng.integers(1, 60))
        self.coordinator.ended(worker, "killed", self.now_ns)

    def _start(self, worker: int) -> None:
        self.coordinator.launched(worker, self.launches[worker], self.now_ns)
        spec = self.coordinator.spec(worker)
        table = spec.expert_table(EXPERTS.num_layers, NUM_EXPERTS)
        self.devices[worker].logical_of = table.logical_of[worker].copy()
        self.down[worker] = -int(self.rng.integers(1, 30))  # it loads

    def _go_on_starting(self, worker: int) -> None:
        if self.down[worker] > 0:
            self.down[worker] -= 1
            if self.down[worker] == 0:
                self._start(worker)
        else:
            self.down[worker] += 1
            if self.down[worker] == 0:
                del self.down[worker]
                joined = Joined(f"ipc://{worker}.{self.launches[worker]}", EXPERTS)
                self.coordinator.on_message(worker, joined, self.now_ns)
                self.inboxes[worker] = self._join(worker)
                self.coordinator.on_message(worker, Ready(None), self.now_ns)

    # --- time -------------------------------------------------------------------------------------------------------

    def turn(self, now_ns: int) -> list:
        self.now_ns = now_ns
        gained = super().turn(now_ns)
        for worker in list(self.down):
            self._go_on_starting(worker)
        if self.rng.random() < self.death_rate:
            running = [each for each in range(self.num_homes, len(self.launches)) if each not in self.down]
            if running:
                self.kill(int(self.rng.choice(running)))
        self._exchange()
        return gained

    def _deliver(self, now_ns: int) -> None:
        for source, target in self.channels:
            if source < self.num_homes <= target and not self._reaches(source, target):
                self.channels[source, target].clear()
        super()._deliver(now_ns)

    def _exchange(self) -> None:
        """Some messages between a worker and the coordinator arrive, and the worker looks into its inbox."""
        worker = int(self.rng.integers(len(self.launches)))
        if worker in self.down:
            return
        inbox = self.inboxes[worker]
        while self.to_worker[worker] and self.rng.random() < 0.7:
            inbox._channel.arrived.append(self.to_worker[worker].popleft())
        inbox._take_in()
        while self.to_server[worker] and self.rng.random() < 0.7:
            self.coordinator.on_message(worker, self.to_server[worker].popleft(), self.now_ns)

    def _reaches(self, home: int, worker: int) -> bool:
        """Whether a home sends to the process that runs."""
        launch = self.inboxes[home]._links.launches.get(worker)
        return worker not in self.down and launch == self.launches[worker]

    # --- laws -------------------------------------------------------------------------------------------------------

    def check_slots(self) -> None:
        """Every slot by which a home sends, and every one for which it waits, has its expert."""
        for home in range(self.num_homes):
            dispatcher, pool = self.executors[home]._core._dispatcher, self.executors[home]._core._pool
            slots = dispatcher._table.logical_of
            for worker, device in enumerate(self.devices):
                if worker != home and worker >= self.num_homes and not self._reaches(home, worker):
                    continue
                is_used = slots[worker] != EMPTY
                is_used[~np.array(IS_SPARSE)] = False
                assert (device.logical_of[is_used] == slots[worker][is_used]).all(), "a slot has another expert"
                places, choices = np.nonzero(pool.owner == worker)
                for place, choice in zip(places.tolist(), choices.tolist(), strict=True):
                    held = device.logical_of[pool.layer_at[place]]
                    assert pool.topk_ids[place, choice] in held, "a token waits for an expert that is gone"
            assert ((pool.owner == THERE) | (pool.owner < len(self.devices))).all()

    def random_target(self) -> ExpertTable:
        """A table of the present shape: each expert on a worker that runs, and some copies."""
        table = self.migration.table
        num_workers, num_layers, num_slots = table.logical_of.shape
        takes = [row for row in range(num_workers) if self.coordinator.takes[self.coordinator.table.first + row]]
        rows = np.full_like(table.logical_of, EMPTY)
        for layer in range(num_layers):
            free = [row for row in takes for _ in range(num_slots)]
            self.rng.shuffle(free)
            placed: dict[int, list[int]] = {row: [] for row in range(num_workers)}
            experts = self.rng.permutation(NUM_EXPERTS).tolist()
            experts += self.rng.integers(0, NUM_EXPERTS, int(self.rng.integers(0, 4))).tolist()
            for expert, row in zip(experts, free, strict=False):
                if expert not in placed[row]:
                    placed[row].append(expert)
            for row, own in placed.items():
                rows[row, layer, : len(own)] = own
        return ExpertTable(0, rows, NUM_EXPERTS, np.ones(num_workers, np.bool_))


def random_requests(rng: np.random.Generator, num: int) -> list:
    return [
        make_request(
            f"r{i}",
            rng.integers(0, VOCAB, int(rng.integers(1, 20))),
            arrival_ns=i,
            max_tokens=int(rng.integers(1, 6)),
        )
        for i in range(num)
    ]


def run_at_once(target, name: str, daemon: bool) -> SimpleNamespace:
    """Stands in for `threading.Thread`, so that every history can be repeated."""
    return SimpleNamespace(start=target)


def rows_of(table: ExpertTable) -> list[list[set[int]]]:
    """Experts of each worker and layer."""
    return [[set(slots) - {EMPTY} for slots in layers] for layers in table.logical_of.tolist()]
