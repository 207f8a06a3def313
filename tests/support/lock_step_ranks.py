"""A group of ranks in lock-step, each with its real loop in a thread. Messages between them come late, in any order."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
from support.fake_device import KvDevice

from moestro.engine.lock_step import LockStepExecutor, LockStepRank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.errors import GroupLostError
from moestro.wire.messages import Outputs, Shutdown, WakeGroup
from moestro.worker.rank_loop import run_rank

SETTINGS = SchedulerSettings(num_blocks=24, block_size=4, max_model_len=48, max_num_seqs=4, max_num_batched_tokens=12)
STUCK_S = 2.0  # a rank that waits so long for the others waits for ever


class Meeting:
    """Lets ranks in threads meet: the fake of a collective."""

    def __init__(self, num_ranks: int) -> None:
        self._numbers = np.zeros(num_ranks, np.int64)
        self._barrier = threading.Barrier(num_ranks)

    def gather(self, rank: int, number: int) -> np.ndarray:
        try:
            self._barrier.wait(STUCK_S)
            self._numbers[rank] = number
            self._barrier.wait(STUCK_S)
            gathered = self._numbers.copy()
            self._barrier.wait(STUCK_S)  # no rank writes before all have read
        except threading.BrokenBarrierError:
            raise GroupLostError("a rank did not come") from None
        return gathered


class LockStepKvDevice(KvDevice):
    """A device without a network; each step has the exchange of one layer, which needs all ranks."""

    is_moving = False

    def __init__(self, rank: int, meeting: Meeting, delay: int) -> None:
        super().__init__(SETTINGS.num_blocks, SETTINGS.block_size, delay)
        self._rank, self._meeting = rank, meeting
        self.num_idle = 0

    def open_step(self, units) -> np.ndarray:
        return self._meeting.gather(self._rank, 0 if units is None else int(units.num_tokens.sum()))

    def launch(self, item, now_ns: int) -> None:
        super().launch(item, now_ns)
        assert self._meeting.gather(self._rank, 1).any()

    def take_part(self, now_ns: int) -> None:
        self.num_idle += 1
        assert self._meeting.gather(self._rank, 0).any(), "a step without tokens"


class ThreadChannel:
    """The inbox of one rank; keeps what the rank sends."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.outputs: list = []
        self.num_steps = 0
        self.sleeps = threading.Event()  # waits for a message without a limit

    def receive(self, wait_s: float | None) -> list:
        messages = []
        if wait_s is None and self.inbox.empty():
            self.sleeps.set()
        with contextlib.suppress(queue.Empty):
            messages.append(self.inbox.get(timeout=wait_s) if wait_s != 0 else self.inbox.get_nowait())
        self.sleeps.clear()
        while not self.inbox.empty():
            messages.append(self.inbox.get())
        return messages

    def has_messages(self) -> bool:
        return not self.inbox.empty()

    def send(self, message: object) -> None:
        if isinstance(message, Outputs):
            self.outputs += message.outputs


class RankThreads:
    """The ranks of a group. `delay_s`: how long a message that wakes a rank is under way, by sender and receiver."""

    def __init__(self, num_ranks: int, delay_s: Callable[[int, int], float], device_delay: int = 0) -> None:
        meeting = Meeting(num_ranks)
        self.devices = [LockStepKvDevice(rank, meeting, device_delay) for rank in range(num_ranks)]
        self.channels = [ThreadChannel() for _ in range(num_ranks)]
        self._delay_s = delay_s
        self.num_woken = 0
        self.ranks = [self._make_rank(number) for number in range(num_ranks)]
        self.lost: list[int] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_ranks)]
        for thread in self._threads:
            thread.start()

    def _make_rank(self, number: int) -> LockStepRank:
        executor = LockStepExecutor(self.devices[number], lambda step: self._wake_others(number, step))
        return LockStepRank(Scheduler(SETTINGS), executor)

    def _wake_others(self, number: int, step: int) -> None:
        self.num_woken += 1
        for other, channel in enumerate(self.channels):
            if other != number:
                threading.Timer(self._delay_s(number, other), channel.inbox.put, (WakeGroup(step),)).start()

    def _run(self, number: int) -> None:
        try:
            run_rank(self.ranks[number], self.channels[number], time.monotonic_ns)
        except GroupLostError:
            self.lost.append(number)

    def wait_until_asleep(self) -> None:
        """Wait until no rank has anything to do and no message is under way."""
        while not self._is_quiet():
            time.sleep(0.001)

    def _is_quiet(self) -> bool:
        """Whether all ranks sleep, before and after the look at the messages under way: then none woke in between."""
        return self._all_sleep() and not _timers() and self._all_sleep()

    def _all_sleep(self) -> bool:
        return all(
            not thread.is_alive() or (channel.sleeps.is_set() and channel.inbox.empty())
            for thread, channel in zip(self._threads, self.channels, strict=True)
        )

    def stop(self) -> None:
        for channel in self.channels:
            channel.inbox.put(Shutdown())
        for thread in self._threads:
            thread.join(4 * STUCK_S)
            assert not thread.is_alive()


def _timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
