"""A group of workers in one process: homes and expert workers that exchange messages over links with moods.

A link keeps the order of its messages. It may repeat one, or lose one; a loss is noticed later, as a timeout would.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from moestro.core.stages import DISPATCH
from moestro.engine.rank import Rank
from moestro.flow.executor import FlowExecutor


class Links:
    """The links from one worker to all others."""

    def __init__(self, group: LinkedGroup, worker: int) -> None:
        self.group, self.worker = group, worker

    def send(self, message, now_ns: int) -> None:
        assert message.hop.src == self.worker != message.hop.dst
        assert len(message.tensor) == message.hop.num_rows
        self.group.channels[self.worker, message.hop.dst].append(message)
        self.group.num_messages += 1


class LinkedGroup:
    """Workers 0 to num_homes - 1 are homes. A subclass appends each worker's executor, and each home's rank.

    Args:
        repeats, losses: chance that a delivery is repeated, and that a message is lost.
    """

    def __init__(
        self, rng: np.random.Generator, num_homes: int, num_workers: int, *, repeats: float = 0.0, losses: float = 0.0
    ) -> None:
        self.rng, self.num_homes, self.repeats, self.losses = rng, num_homes, repeats, losses
        self.channels: dict = {(a, b): deque() for a in range(num_workers) for b in range(num_workers) if a != b}
        self.lost: list[tuple[int, int]] = []  # (home, worker) of messages that were lost and not missed yet
        self.num_messages = 0
        self.executors: list[FlowExecutor] = []
        self.ranks: list[Rank] = []

    def turn(self, now_ns: int) -> list:
        """One worker, at random, does a piece of work, or one message arrives; (home, output) of what was gained."""
        gained = []
        worker = int(self.rng.integers(len(self.executors)))
        if worker < self.num_homes:
            gained += [(worker, output) for output in self.ranks[worker].step(now_ns, lambda _: True)]
        else:
            self.executors[worker].start(now_ns)
            assert self.executors[worker].poll(now_ns, lambda _: True) is None
        for _ in range(int(self.rng.integers(0, 4))):
            self._deliver(now_ns)
        if self.lost and self.rng.random() < 0.1:
            home, peer = self.lost.pop(0)
            self.executors[home].lose(peer, now_ns)
        return gained

    def _deliver(self, now_ns: int) -> None:
        waiting = [channel for channel, messages in self.channels.items() if messages]
        if not waiting:
            return
        src, dst = waiting[self.rng.integers(len(waiting))]
        message = self.channels[src, dst].popleft()
        if self.rng.random() < self.losses:
            self.lost.append((src, dst) if message.hop.kind == DISPATCH else (dst, src))
            return
        for _ in range(1 + (self.rng.random() < self.repeats)):
            self.executors[dst].receive(message, now_ns)

    @property
    def is_idle(self) -> bool:
        return not any(self.channels.values()) and not self.lost and not any(rank.has_work for rank in self.ranks)

    def check_empty(self) -> None:
        """Nothing is left when all requests have ended."""
        for executor in self.executors:
            core = executor._core
            assert core.num_plans == core.num_launched == core._queues.num_waiting == 0
            assert core._pool.num_free_rows == core.shape.num_rows, "a row leaked"
            assert core._pool.num_free_places == core.shape.num_places, "a place leaked"
            assert core._remote.num_free == core.shape.num_remote_places, "a remote token leaked"


def serve(group: LinkedGroup, requests: list, *, abort_share: float = 0.0) -> dict[str, list[int]]:
    """Run everything to its end; tokens of the requests that were not aborted, by id."""
    rng, waiting, home_of = group.rng, list(requests), {}
    tokens: dict[str, list[int]] = {}
    ended, aborted = set(), set()
    for now_ns in range(200_000):
        if waiting and rng.random() < 0.1:
            request, home = waiting.pop(0), int(rng.integers(group.num_homes))
            home_of[request.request_id] = home
            group.ranks[home].add(request, now_ns)
        for home, output in group.turn(now_ns):
            assert home_of[output.request_id] == home
            assert output.request_id not in ended | aborted
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ended.add(output.request_id)
        if rng.random() < abort_share and home_of:
            victim = str(rng.choice(list(home_of)))
            if victim in group.ranks[home_of[victim]].scheduler.by_id:
                group.ranks[home_of[victim]].abort(victim, now_ns)
                aborted.add(victim)
        if not waiting and group.is_idle:
            for later_ns in range(now_ns, now_ns + 2000):
                group.turn(later_ns)  # what no request needs any more runs out
            group.check_empty()
            return {name: tokens.get(name, []) for name in ended}
    raise AssertionError("a token was forgotten, or credits are in a deadlock")
