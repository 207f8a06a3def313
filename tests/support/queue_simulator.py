"""One device with micro-queues and a step policy, as small as it can be while tokens arrive, wait and starve.

Each token is a unit: attention 0, one expert drawn at random, attention 1, and so on to the sampler. A run takes a
fixed time and a little for each of its tokens. There are always places.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from support.queue_tables import table_of

from moestro.core.views import ATTENTION, EMPTY_QUEUE_NS, NUM_CLASSES, QueueTable, StepPolicy, Wait

RUN_NS, RUN_NS_PER_TOKEN = 100, 1


@dataclass
class QueueSimulator:
    """Queues of one device.

    Attributes:
        num_layers, num_experts: sizes of the device.
        policy: chooses what runs.
        now_ns: the time.
        num_done: tokens that left the sampler.
        longest_run_ns: longest time of a run.
        runs: (layer, group) of each run.
    """

    num_layers: int
    num_experts: int
    policy: StepPolicy
    seed: int = 0
    now_ns: int = 0
    num_done: int = 0
    longest_run_ns: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    _longest_ns: int = 0
    # (class, layer, group) -> for each token, since when it waits there, ascending
    _waiting: defaultdict[tuple[int, int, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def arrive(self, service_class: int, since_ns: int) -> None:
        """Add one token before the first attention."""
        self._waiting[service_class, 0, ATTENTION].append(since_ns)

    @property
    def longest_wait_ns(self) -> int:
        """Longest time of a token in one queue so far, of those that still wait too."""
        return max([self._longest_ns, *(self.now_ns - since[0] for since in self._waiting.values() if since)])

    @property
    def num_waiting(self) -> int:
        """Tokens in all queues."""
        return sum(map(len, self._waiting.values()))

    def step(self) -> None:
        """Run what the policy chooses."""
        run = self.policy(self.table(), self.now_ns)
        assert not isinstance(run, Wait)
        started_ns, left, taken = self.now_ns, run.max_rows, []
        for service_class in run.classes:
            queue = self._waiting[service_class, run.layer, run.group]
            taken += [(service_class, since_ns) for since_ns in queue[:left]]
            left -= len(queue[:left])
            del queue[: run.max_rows - left]
        assert taken, f"{run} took nothing"
        self._longest_ns = max([self._longest_ns, *(started_ns - since_ns for _, since_ns in taken)])
        duration_ns = RUN_NS + RUN_NS_PER_TOKEN * len(taken)
        self.longest_run_ns = max(self.longest_run_ns, duration_ns)
        self.now_ns += duration_ns
        self.runs.append((run.layer, run.group))
        self._move_on(run.layer, run.group, [service_class for service_class, _ in taken])

    def _move_on(self, layer: int, group: int, classes: list[int]) -> None:
        if layer == self.num_layers:
            self.num_done += len(classes)
            return
        experts = 1 + self._rng.integers(self.num_experts, size=len(classes))
        for service_class, expert in zip(classes, experts.tolist(), strict=True):
            to = (layer, expert) if group == ATTENTION else (layer + 1, ATTENTION)
            self._waiting[(service_class, *to)].append(self.now_ns)

    def table(self) -> QueueTable:
        """Show the queues as a policy sees them."""
        shape = (NUM_CLASSES, self.num_layers + 1, 1 + self.num_experts)
        n, oldest_ns = np.zeros(shape, np.int32), np.full(shape, EMPTY_QUEUE_NS)
        for at, since in self._waiting.items():
            if since:
                n[at], oldest_ns[at] = len(since), since[0]
        return table_of(n, oldest_ns)


def run_with_arrivals(simulator: QueueSimulator, num_runs: int, *, every_ns: int, classes: tuple[int, ...]) -> None:
    """Do `num_runs` runs, while one token arrives every `every_ns`, the classes in turn; never idle."""
    next_ns, num = simulator.now_ns, 0
    for _ in range(num_runs):
        while next_ns <= simulator.now_ns or not simulator.num_waiting:
            simulator.now_ns = max(simulator.now_ns, next_ns)
            simulator.arrive(classes[num % len(classes)], next_ns)
            next_ns, num = next_ns + every_ns, num + 1
        simulator.step()
