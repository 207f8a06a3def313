"""Measures what a rank does around the device's work, in the main loop of a server's rank on the real device.

Between two steps a rank takes results, plans, and sends tokens to another process that sleeps meanwhile. A step of the
device replaces what the processor's caches held, so all that takes a few times longer than without a device. On a CPU
the step after a chunk takes longer, too.
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
from typing import NamedTuple, Protocol

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
from moestro.worker.rank_builder import ExpertCollection
from moestro.worker.rank_loop import run_rank

# Tokens, or less in a shorter context: of the answers that decode all the time and their prompts, and of other prompts.
_ANSWER, _SHORT_PROMPT, _PROMPT = 160, 16, 128
_LEAST_STEPS, _MOST_STEPS, _ENOUGH_S = 32, 128, 4.0  # for each number of sequences
_NEW_EVERY = 6  # steps from one new request to the next, so that most steps are far from a chunk
_WARM_STEPS = 8


class CalibratedDevice(Device, Protocol):
    """A device that says when it works."""

    @property
    def works_when_polled(self) -> bool:
        """Whether polling does the work; else it begins at the launch."""
        ...


class MeasuredStep(NamedTuple):
    """A step of the device.

    Attributes:
        has_chunk, had_chunk: Whether this step, or the one before it, computes a chunk of a prompt.
        gap_ns: Nanoseconds before it without work for the device.
        work_ns: Nanoseconds until its results.
    """

    has_chunk: bool
    had_chunk: bool
    gap_ns: int
    work_ns: int


class StepTimer:
    """Passes work to a device, and measures steps that begin when the device has no other work.

    Args:
        device: The device.
        clock_ns: Clock that measures.

    Attributes:
        found: The steps but the first.
        num_running: Steps launched without a result.
    """

    def __init__(self, device: CalibratedDevice, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._device, self._clock_ns = device, clock_ns
        self.found: list[MeasuredStep] = []
        self.num_running = 0
        self._began_ns: int | None = None
        self._ended_ns: int | None = None  # of the last step with a result
        self._gap_ns: int | None = None
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
            self._end()
        return results

    def ready_at_ns(self) -> int | None:
        """Implement `Device.ready_at_ns`."""
        return self._device.ready_at_ns()

    def _begin(self) -> None:
        """Note the begin of a step, unless the device has other work."""
        if self._began_ns is None:
            self._began_ns = self._clock_ns()
            self._gap_ns = None if self._ended_ns is None else self._began_ns - self._ended_ns
        elif not self._device.works_when_polled:
            self._gap_ns = None  # two steps at once: neither is measured

    def _end(self) -> None:
        self._ended_ns = self._clock_ns()
        assert self._began_ns is not None, "what ends has begun"
        if self._gap_ns is not None:
            work_ns = self._ended_ns - self._began_ns
            self.found.append(MeasuredStep(self._has_chunk, self._had_chunk, self._gap_ns, work_ns))
        self._began_ns = None


class _Load:
    """The messages of a load: some long answers, and now and then a request for one token. Implements `RankInbox`.

    Args:
        channel: Takes what the rank sends.
        make_request: Makes a request with so many tokens in its prompt and its answer.
        num_sequences: Long answers at a time; a new one follows each.
        answer: Their tokens.
    """

    def __init__(
        self, channel: Channel, make_request: Callable[[int, int], Request], num_sequences: int, answer: int
    ) -> None:
        self.num_steps, self.owes = 0, True
        self._channel, self._make_request, self._answer = channel, make_request, answer
        self._next_at = _WARM_STEPS
        long = [make_request(_SHORT_PROMPT, answer) for _ in range(num_sequences)]
        self._long = {request.request_id for request in long}
        self._waiting: list[ToRank] = [Add(request) for request in long]
        self._end_by_s = time.monotonic() + _ENOUGH_S

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Return what is due."""
        messages, self._waiting = self._channel.receive(0) + self._waiting, []
        if self.num_steps >= self._next_at:
            self._next_at += _NEW_EVERY
            messages.append(Add(self._make_request(_PROMPT, 1)))
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
            for ended in (each.request_id for each in message.outputs.others if each.finish_reason is not None):
                if ended in self._long:
                    request = self._make_request(_SHORT_PROMPT, self._answer)
                    self._long.add(request.request_id)
                    self._waiting.append(Add(request))


def host_times(
    device: CalibratedDevice,
    limits: Limits,
    rng: np.random.Generator,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> HostTimes:
    """Measure the rank's own work at one sequence, at half of the maximum, and at the maximum.

    Args:
        limits: What the device holds, and the most sequences.
        rng: Draws the prompts.
        clock_ns: Clock that measures.
    """
    longest = min(_PROMPT + _ANSWER, limits.max_model_len) + limits.block_size
    most = min(limits.max_num_seqs, limits.num_blocks * limits.block_size // longest - 1)
    counts = sorted({1, max(most // 2, 1), max(most, 1)})
    with _channel() as channel:
        found = [_steps(StepTimer(device, clock_ns), limits, count, channel, rng) for count in counts]
    gaps = [_median_ns(steps, has_chunk=False, had_chunk=False) for steps in found]
    slope = max(float(np.polyfit(counts, gaps, 1)[0]), 0.0) if len(counts) > 1 else 0.0
    step_ns = max(statistics.fmean(gaps) - slope * statistics.fmean(counts), 0.0)
    # A chunk lengthens the gap before its step, and all of the step after it.
    before = [_median_ns(steps, has_chunk=True, had_chunk=False) - gap for steps, gap in zip(found, gaps, strict=True)]
    after = [
        _median_ns(steps, has_chunk=False, had_chunk=True, with_work=True)
        - _median_ns(steps, has_chunk=False, had_chunk=False, with_work=True)
        for steps in found
    ]
    chunk_ns = statistics.fmean(before) + statistics.fmean(after)
    return HostTimes(step_ns=step_ns, sequence_ns=slope, chunk_ns=max(chunk_ns, 0.0))


def _median_ns(steps: list[MeasuredStep], *, has_chunk: bool, had_chunk: bool, with_work: bool = False) -> float:
    """Return the median gap of one kind of steps, or of gap and work; of all steps if there is none of this kind.

    In a short context answers end so soon that every step is near a chunk.
    """
    chosen = [step for step in steps if (step.has_chunk, step.had_chunk) == (has_chunk, had_chunk)] or steps
    return statistics.median(step.gap_ns + with_work * step.work_ns for step in chosen)


def _steps(
    timer: StepTimer, limits: Limits, num_sequences: int, channel: Channel, rng: np.random.Generator
) -> list[MeasuredStep]:
    """Return the steps of a load with `num_sequences` long answers, after some steps that warm up."""
    longest = min(limits.max_model_len // 2, limits.max_num_batched_tokens)
    answer = min(_ANSWER, limits.max_model_len - min(_SHORT_PROMPT, longest))
    numbers = itertools.count()

    def make_request(num_prompt_tokens: int, max_tokens: int) -> Request:
        prompt = rng.integers(limits.vocab_size, size=min(num_prompt_tokens, longest), dtype=np.int32)
        return Request(
            request_id=f"{num_sequences}-{next(numbers)}",
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_ns=0,
            token_ids=prompt.tobytes(),
        )

    settings = SchedulerSettings(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=num_sequences + 1,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    load = _Load(channel, make_request, num_sequences, answer)
    rank = build_rank(settings, timer)
    rank.expert_observer = ExpertCollection(ExpertLoadSettings())
    run_rank(rank, load, time.monotonic_ns)
    while timer.num_running:
        timer.poll(time.monotonic_ns())
    return timer.found[_WARM_STEPS:]


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
