"""Ranks in lock-step with networks, each with its real loop in a thread, whose experts an API server moves to and fro.

The exchange and the messages are fakes; the ranks, their loops, the networks and the server's migration are real.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from support.lock_step_processes import SETTINGS
from support.lock_step_processes import settings_of as model_settings
from support.lock_step_ranks import STUCK_S, ThreadChannel

from moestro.config.launch_spec import LockStepSpec
from moestro.core.experts.expert_table import TableMessage
from moestro.core.request import Request
from moestro.engine.lock_step import build_lock_step_rank
from moestro.errors import GroupLostError
from moestro.model.device import open_device
from moestro.model.experts.spread_device import SpreadDevice
from moestro.model.network import WorkerShare
from moestro.model.settings import LocalRank
from moestro.placement.live.ep_migration import EpMigration
from moestro.wire.messages import Add, ExpertsPlaced, LayerSettled, MoveLayer, Outputs, Ready, Shutdown, WakeGroup
from moestro.worker.network_rank import table_of
from moestro.worker.rank_loop import SideJobs, run_rank

_WAIT_S = 20 * STUCK_S
_PREPARED = 3  # of the numbers of a handshake: tokens, then those of `MoveAgreement.numbers`
CANCEL = object()  # event: the operator ends the migration


class ThreadMeeting:
    """What the workers of a group in threads exchange: every call ends when all have made it."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers)
        self._parts: list = [None] * num_workers

    def swap(self, worker: int, part: object) -> list:
        """Return the parts of all workers."""
        try:
            self._barrier.wait(_WAIT_S)
            self._parts[worker] = part
            self._barrier.wait(_WAIT_S)
            parts = list(self._parts)
            self._barrier.wait(_WAIT_S)  # no rank writes before all have read
        except threading.BrokenBarrierError:
            raise GroupLostError("a worker did not come") from None
        return parts

    def leave(self) -> None:
        """End the exchange for all."""
        self._barrier.abort()


class ThreadExchange:
    """The exchange of one worker; counts the bytes that it sends and takes in between two steps."""

    def __init__(self, meeting: ThreadMeeting, worker: int, num_workers: int) -> None:
        self._meeting, self.worker, self.num_workers = meeting, worker, num_workers
        self.most_sent = self.most_taken = 0  # bytes of experts in one round
        self.ends_when_prepared = False  # whether the worker ends when it would say that it has all experts of a layer

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        if self.ends_when_prepared and numbers[_PREPARED]:
            raise GroupLostError("the worker ends")
        return np.stack(self._meeting.swap(self.worker, numbers))

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[self.worker] for part in self._meeting.swap(self.worker, counts)])

    def exchange_rows(self, rows: torch.Tensor, num_sent: list[int], num_received: list[int]) -> torch.Tensor:
        parts = self._meeting.swap(self.worker, rows.split(num_sent))
        received = torch.cat([part[self.worker] for part in parts])
        assert [len(part[self.worker]) for part in parts] == num_received
        if rows.dtype is torch.uint8:
            self.most_sent = max(self.most_sent, rows.numel())
            self.most_taken = max(self.most_taken, received.numel())
        return received


class _TellingChannel(ThreadChannel):
    """Passes on what the rank sends to the server and to the other ranks."""

    def __init__(self, on_sent: Callable[[object], None]) -> None:
        super().__init__()
        self.send = on_sent


class MovingRanks:
    """A group that serves requests while a server moves its experts.

    Args:
        checkpoint: network.
        num_ranks, num_redundant: shape of the group.
        dtype: of the network.
        placed: placement with which the group starts; None means an even one.
    """

    def __init__(
        self,
        checkpoint: Path,
        num_ranks: int,
        num_redundant: int,
        dtype: str = "float64",
        placed: TableMessage | None = None,
    ) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.running: set[str] = set()
        self.lost: list[str] = []
        self.events: queue.SimpleQueue = queue.SimpleQueue()  # what the server has not read yet
        self._meeting = ThreadMeeting(num_ranks)
        self.exchanges = [ThreadExchange(self._meeting, rank, num_ranks) for rank in range(num_ranks)]
        self.channels = [_TellingChannel(partial(self._sent, rank)) for rank in range(num_ranks)]
        spec = LockStepSpec(num_ranks=num_ranks, port=0, listen_fd=None, join_by_ns=0, timeout_s=0,
                            num_redundant_experts=num_redundant, placed=placed)  # fmt: skip
        self.devices = [self._open(spec, checkpoint, dtype, rank) for rank in range(num_ranks)]
        self.ranks = [
            build_lock_step_rank(SETTINGS, device, lambda step, rank=rank: self._sent(rank, WakeGroup(step)))
            for rank, device in enumerate(self.devices)
        ]
        self.migration = EpMigration(num_ranks, lambda rank, message: self.channels[rank].inbox.put(message))
        self.migration.on_message(0, ExpertsPlaced(self.devices[0].placed))
        for rank in range(num_ranks):
            self.migration.on_message(rank, Ready(None))
        self.devices[0].moves.on_settled = lambda settled: self.events.put(LayerSettled(settled))
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(num_ranks)]
        for thread in self._threads:
            thread.start()

    def _open(self, spec: LockStepSpec, checkpoint: Path, dtype: str, rank: int) -> SpreadDevice:
        share = WorkerShare(worker=rank, make_table=partial(table_of, spec))
        alone, info = open_device(model_settings(checkpoint, dtype), lambda _: None, LocalRank(rank=rank), share)
        table = table_of(spec, info.num_layers, info.num_experts)
        return SpreadDevice(alone.network, alone.pools, self.exchanges[rank], table)

    def _run(self, rank: int) -> None:
        made = self.ranks[rank]
        jobs = SideJobs(
            move_experts=lambda message: (
                made.move_layer(message.plan) if isinstance(message, MoveLayer) else made.drop_layer(message.version)
            )
        )
        try:
            run_rank(made, self.channels[rank], time.monotonic_ns, jobs)
        except GroupLostError as error:
            self.lost.append(str(error))
        except BaseException as error:
            self.lost.append(repr(error))
            raise
        finally:
            self._meeting.leave()  # as the end of a process does

    def _sent(self, rank: int, message: object) -> None:
        if isinstance(message, WakeGroup):
            for other, channel in enumerate(self.channels):
                if other != rank:
                    channel.inbox.put(message)
        elif isinstance(message, Outputs):
            for output in message.outputs:
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self.running.discard(output.request_id)

    def add(self, rank: int, request: Request) -> None:
        """Give a request to a rank."""
        self.tokens[request.request_id] = []
        self.running.add(request.request_id)
        self.channels[rank].inbox.put(Add(request))

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Let the server read what the ranks have reported. Returns whether there was anything."""
        try:
            message = self.events.get(timeout=timeout_s) if timeout_s else self.events.get_nowait()
        except queue.Empty:
            return False
        if message is CANCEL:
            self.migration.cancel()
        else:
            self.migration.on_message(0, message)
        return True

    def settle(self) -> None:
        """Wait until the migration has ended."""
        while self.migration.progress.is_running:
            assert self.hear(_WAIT_S), (self.lost, self.migration.progress)

    def all_sleep(self) -> bool:
        """Whether no rank has anything to do."""
        return all(channel.sleeps.is_set() and channel.inbox.empty() for channel in self.channels)

    def stop(self) -> None:
        """End the ranks."""
        for channel in self.channels:
            channel.inbox.put(Shutdown())
        for thread in self._threads:
            thread.join(_WAIT_S)
            assert not thread.is_alive()
