"""Measures what a rank does around the device's work, in the main loop of a server's rank on the real device.

Between two steps a rank takes results, plans, and sends tokens to another process that sleeps meanwhile. A step of the
device replaces what the processor's caches held, so all that takes a few times longer than without a device.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from moestro.calibrate.shapes import Limits
from moestro.core.request import Request, SamplingParams
from moestro.core.work import BlockMoves, Device, Forward, StepResult
from moestro.cost.tables import HostTimes
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.messages import Add, FromRank, Outputs, Shutdown, ToRank
from moestro.worker.channel import Channel
from moestro.worker.expert_collection import ExpertCollection
from moestro.worker.rank_loop import run_rank

_PROMPT, _ANSWER = 16, 160  # tokens, or less in a shorter context
_LEAST_STEPS, _MOST_STEPS, _ENOUGH_S = 32, 128, 4.0  # for each number of sequences
_NEW_EVERY = 6  # steps from one new request to the next, so that most steps are far from a chunk
_WARM_STEPS = 8


class CalibratedDevice(Device, Protocol):
    """A device that says when it works."""

    @property
    def works_when_polled(self) -> bool:
        """Whether polling does the work; else it begins at the launch."""
        ...


class Gaps:
    """Passes work to a device, and measures how long the device has none before each step.

    Args:
        device: The device.

    Attributes:
        found: Of each step but the first: nanoseconds without work before it, and whether it, or the step before it,
            had a chunk.
        num_running: Steps launched without a result.
    """

    def __init__(self, device: CalibratedDevice) -> None:
        self._device = device
        self.found: list[tuple[int, bool]] = []
        self.num_running = 0
        self._ended_ns: int | None = None
        self._has_chunk = self._had_chunk = False  # the last step, and the one before it

    def launch(self, item: Forward, now_ns: int) -> None:
        """Implement `Device.launch`."""
        self.num_running += 1
        self._had_chunk, self._has_chunk = self._has_chunk, bool((item.units.num_tokens > 1).any())
        if not self._device.works_when_polled:
            self._begin()
        self._device.launch(item, now_ns)

    def move_blocks(self, moves: BlockMoves, now_ns: int) -> None:
        """Implement `Device.move_blocks`."""
        self._device.move_blocks(moves, now_ns)

    def poll(self, now_ns: int) -> list[StepResult]:
        """Implement `Device.poll`."""
        if self.num_running and self._device.works_when_polled:
            self._begin()
        results = self._device.poll(now_ns)
        self.num_running -= len(results)
        if results and not self.num_running:
            self._ended_ns = time.perf_counter_ns()
        return results

    def ready_at_ns(self) -> int | None:
        """Implement `Device.ready_at_ns`."""
        return self._device.ready_at_ns()

    def _begin(self) -> None:
        if self._ended_ns is not None:
            self.found.append((time.perf_counter_ns() - self._ended_ns, self._has_chunk or self._had_chunk))
            self._ended_ns = None


class _Load:
    """The messages of a load: some long answers, and now and then a request for one token. Implements `RankInbox`.

    Args:
        channel: Takes what the rank sends.
        make_request: Makes a request for so many tokens.
        num_sequences: Long answers at a time; a new one follows each.
        answer: Their tokens.
    """

    def __init__(
        self, channel: Channel, make_request: Callable[[int], Request], num_sequences: int, answer: int
    ) -> None:
        self.num_steps, self.owes = 0, True
        self._channel, self._make_request, self._answer = channel, make_request, answer
        self._next_at = _WARM_STEPS
        long = [make_request(answer) for _ in range(num_sequences)]
        self._long = {request.request_id for request in long}
        self._waiting: list[ToRank] = [Add(request) for request in long]
        self._end_by_s = time.monotonic() + _ENOUGH_S

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Return what is due."""
        messages, self._waiting = self._channel.receive(0) + self._waiting, []
        if self.num_steps >= self._next_at:
            self._next_at += _NEW_EVERY
            messages.append(Add(self._make_request(1)))
            is_late = time.monotonic() > self._end_by_s
            if self.num_steps >= (_LEAST_STEPS if is_late else _MOST_STEPS):
                messages.append(Shutdown())
        return messages

    def has_messages(self) -> bool:
        """Return whether something is due."""
        return bool(self._waiting) or self._channel.has_messages() or self.num_steps >= self._next_at

    def send(self, message: FromRank) -> None:
        """Send as a rank does."""
        self._channel.send(message)
        if isinstance(message, Outputs):
            for ended in (each.request_id for each in message.outputs if each.finish_reason is not None):
                if ended in self._long:
                    request = self._make_request(self._answer)
                    self._long.add(request.request_id)
                    self._waiting.append(Add(request))


def host_times(device: CalibratedDevice, limits: Limits, rng: np.random.Generator) -> HostTimes:
    """Measure the rank's own work at one sequence, at half of the maximum, and at the maximum.

    Args:
        limits: What the device holds, and the most sequences.
        rng: Draws the prompts.
    """
    longest = min(_PROMPT + _ANSWER, limits.max_model_len) + limits.block_size
    most = min(limits.max_num_seqs, limits.num_blocks * limits.block_size // longest - 1)
    counts = sorted({1, max(most // 2, 1), max(most, 1)})
    with _channel() as channel:
        found = [_gaps(device, limits, count, channel, rng) for count in counts]
    # In a short context answers end so soon that every step is near a chunk.
    decodes = [statistics.median([ns for ns, near in gaps if not near] or [ns for ns, _ in gaps]) for gaps in found]
    slope = max(float(np.polyfit(counts, decodes, 1)[0]), 0.0) if len(counts) > 1 else 0.0
    step_ns = max(statistics.fmean(decodes) - slope * statistics.fmean(counts), 0.0)
    # A chunk lengthens the gap before its step, and the one after it.
    more = [ns - decode for gaps, decode in zip(found, decodes, strict=True) for ns, near in gaps if near]
    return HostTimes(step_ns=step_ns, sequence_ns=slope, chunk_ns=max(2 * statistics.median(more), 0.0))


def _gaps(
    device: CalibratedDevice, limits: Limits, num_sequences: int, channel: Channel, rng: np.random.Generator
) -> list[tuple[int, bool]]:
    """Return the gaps of a load with `num_sequences` long answers, after some steps that warm up."""
    prompt_len = min(_PROMPT, limits.max_model_len // 2)
    answer = min(_ANSWER, limits.max_model_len - prompt_len)
    numbers = itertools.count()

    def make_request(max_tokens: int) -> Request:
        prompt = rng.integers(limits.vocab_size, size=prompt_len, dtype=np.int32)
        return Request(
            request_id=f"{num_sequences}-{next(numbers)}",
            num_prompt_tokens=prompt_len,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_ns=0,
            token_ids=prompt.tobytes(),
        )

    settings = SchedulerSettings(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=num_sequences + 1,
        max_num_batched_tokens=prompt_len * (num_sequences + 1),
    )
    gaps = Gaps(device)
    load = _Load(channel, make_request, num_sequences, answer)
    rank = build_rank(settings, gaps)
    rank.expert_observer = ExpertCollection(ExpertLoadSettings())
    run_rank(rank, load, time.monotonic_ns)
    while gaps.num_running:
        gaps.poll(time.monotonic_ns())
    return gaps.found[_WARM_STEPS:]


@contextlib.contextmanager
def _channel() -> Iterator[Channel]:
    """Connect a rank's channel to a process that reads in place of the API server.

    It runs on another core than this one's if there is one.
    """
    cores = getattr(os, "sched_getaffinity", lambda _: set[int]())(0)
    with (
        tempfile.TemporaryDirectory(prefix="moestro-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder) / "api")
        listener.bind(path)
        listener.listen()
        process = multiprocessing.get_context("spawn").Process(target=_read, args=(listener, cores), daemon=True)
        process.start()
        parent_fd, ours = os.pipe()
        channel = Channel(f"ipc://{path}", b"calibrate", parent_fd)
        try:
            yield channel
        finally:
            channel.close()
            os.close(parent_fd)
            os.close(ours)
            process.join()


def _read(listener: socket.socket, used_cores: set[int]) -> None:
    if others := set(range(os.cpu_count() or 1)) - used_cores:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, others)
    connection, _ = listener.accept()
    while connection.recv(1 << 16):
        pass
