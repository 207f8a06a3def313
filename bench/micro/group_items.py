"""Measures the host's time for each item of attention workers and of expert workers in a group.

    OMP_NUM_THREADS=1 python bench/micro/group_items.py --json bench/results/micro/group_items.json

Four homes and four expert workers run the production core, policy and executor over devices that compute nothing. A
home's item is an attention over its 256 decode units: four replies taken in, the choice, the item, and the dispatch to
four workers. An expert worker's item is a batch of about 256 tokens of four homes: four dispatches taken in, the
choice, the item, and four replies. Goals (docs/architecture.md): 250 and 100 microseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.experts.expert_table import spread_evenly
from moestro.core.stages import Attention, AttentionDone, Experts, ExpertsDone, Sample, StageShape
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Plan, StepResult, Units
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor
from moestro.flow.registry import make_step_policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

NUM_HOMES, NUM_LAYERS, NUM_EXPERTS, TOKENS, STEPS, REPEATS = 4, 32, 4, 256, 6, 9
TABLE_WIDTH = 16  # blocks of a sequence of 256 tokens


class NullDevice:
    """A device that answers at once, with experts drawn in advance."""

    works_when_polled = False

    def __init__(self, shape: StageShape, seed: int) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        self.gates = rng.integers(0, NUM_EXPERTS, (NUM_LAYERS, TOKENS, 1)).astype(np.int32)
        self.items: deque = deque()
        self.num_items = 0

    def launch(self, item, now_ns: int) -> None:
        """Implement `StagedDevice.launch`."""
        self.items.append(item)
        self.num_items += 1

    def poll(self, now_ns: int) -> list:
        """Implement `StagedDevice.poll`."""
        results = [self._result(item) for item in self.items]
        self.items.clear()
        return results

    def _result(self, item):
        match item:
            case Attention(layer):
                return AttentionDone(self.gates[layer, : len(item.rows)])
            case Experts():
                return ExpertsDone(len(item.experts))
            case Sample(units):
                return StepResult(units.slot, np.zeros(len(units), np.int32))

    def ready_at_ns(self) -> int | None:
        """Implement `StagedDevice.ready_at_ns`."""
        return 0 if self.items else None

    def read_inputs(self, places) -> None:
        """Implement `StagedDevice.read_inputs`."""

    store_inputs = read_contributions = store_contributions = lambda self, *args: None


class Group:
    """Four homes and four expert workers whose time is measured by kind."""

    def __init__(self, policy: str) -> None:
        num_workers = NUM_HOMES + NUM_EXPERTS
        table = spread_evenly(NUM_LAYERS, NUM_EXPERTS, list(range(NUM_HOMES, num_workers)), num_workers)
        self.inboxes: list[deque] = [deque() for _ in range(num_workers)]
        self.spent_ns = [0, 0]  # of homes, of expert workers
        self.executors, self.devices = [], []
        for worker in range(num_workers):
            is_home = worker < NUM_HOMES
            shape = StageShape(
                is_sparse=(True,) * NUM_LAYERS,
                num_experts=0 if is_home else 1,
                num_chosen=1,
                num_rows=2 * TOKENS * is_home,
                num_places=2 * TOKENS * is_home,
                num_remote_places=0 if is_home else 2 * TOKENS * NUM_HOMES,
            )
            peers = PeerSettings(worker=worker, num_workers=num_workers, table=table, num_credits=2 * TOKENS)
            self.devices.append(NullDevice(shape, worker))
            self.executors.append(FlowExecutor(self.devices[-1], make_step_policy(policy, 1.0), 1, peers, self))

    def send(self, message, now_ns: int) -> None:
        """Implement `Links.send`."""
        self.inboxes[message.hop.dst].append(message)

    def step(self) -> None:
        """Take 256 units of each home through all layers."""
        for home in range(NUM_HOMES):
            self._timed(home, lambda home=home: self.executors[home].submit(Plan(0, make_units()), 0))
        left = NUM_HOMES
        while left:
            for worker in range(len(self.executors)):
                left -= self._timed(worker, lambda worker=worker: self._work(worker)) is not None

    def _work(self, worker: int):
        executor, inbox = self.executors[worker], self.inboxes[worker]
        while inbox:
            executor.receive(inbox.popleft(), 0)
        executor.start(0)
        return executor.poll(0)

    def _timed(self, worker: int, work):
        started = time.process_time_ns()
        result = work()
        self.spent_ns[worker >= NUM_HOMES] += time.process_time_ns() - started
        return result

    def items_us(self) -> tuple[float, float]:
        """Microseconds of an item of a home, and of an expert worker, since the last call."""
        items = [device.num_items for device in self.devices]
        counts = sum(items[:NUM_HOMES]), sum(items[NUM_HOMES:])
        spent = self.spent_ns
        for device in self.devices:
            device.num_items = 0
        self.spent_ns = [0, 0]
        return spent[0] / counts[0] / 1e3, spent[1] / counts[1] / 1e3


def make_units() -> Units:
    """Make 256 decode units of a hashed trace."""
    zeros = np.zeros(TOKENS, np.int32)
    return Units(
        slot=np.arange(TOKENS),
        serial=np.arange(TOKENS),
        service_class=zeros.astype(np.uint8),
        start=zeros + 200,
        num_tokens=zeros + 1,
        write_start=zeros + 200,
        logits=(zeros + LOGITS_LAST).astype(np.uint8),
        block_tables=np.zeros((TOKENS, TABLE_WIDTH), np.int32),
        sampling=np.zeros(TOKENS, SAMPLING_ROW),
        token_ids=None,
    )


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions, rows = run_record("measured"), []
    for policy in ("defrag", "mtfs", "urgent:inner=defrag"):
        group = Group(policy)
        group.step()
        group.items_us()
        found = []
        for _ in range(REPEATS):
            for _ in range(STEPS):
                group.step()
            found.append(group.items_us())
        homes, workers = zip(*found, strict=True)
        rows.append({"policy": policy, "attention_us": spread(list(homes)), "expert_us": spread(list(workers))})
        print(f"{policy:24} attention {statistics.median(homes):6.1f} us   expert {statistics.median(workers):6.1f} us")
    save(args.json, conditions, {"rows": rows})


if __name__ == "__main__":
    main()
