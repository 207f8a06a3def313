"""Ranks on virtual time: the production scheduler, executor and cache over scripted devices, in steps or jumps.

A *step* is schedule, launch, update. Where the schedulers say that the coming steps are all alike (`horizon`), they
are taken at once: the cost model prices them, nothing is done until the last of them is over, and then `advance` has
the effect of all. A request that arrives in between shortens the jump to the step that is under way; nothing has to be
undone, because nothing was done yet. With `jump=False` every step is taken on its own: the oracle of the laws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.request import Request
from moestro.core.script import Script
from moestro.core.work import Int32s, Plan, Slots
from moestro.cost.priced_device import ScriptedDevice, Scripts
from moestro.engine.decode_horizon import DecodeJumps, Horizon, steps_without_blocks
from moestro.engine.fused import FusedExecutor
from moestro.engine.rank import Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.engine.step_output import StepOutput
from moestro.sim.prices import Prices

Int64s = NDArray[np.int64]

_LONGEST_JUMP = 1024  # steps; a longer one is split, for most are cut by the next arrival and priced in vain
_NO_SLOTS = np.empty(0, np.int64)
_NOBODY = np.empty(0, np.int32)
STEPWISE = Horizon(0, FOREVER_NS)


class KvEvent(NamedTuple):
    """A block that a rank's prefix cache stores or removes.

    Attributes:
        at_ns: when it says so: at the end of the step in which it happens.
        is_stored: else removed.
        block_hash: its name.
    """

    at_ns: int
    is_stored: bool
    block_hash: bytes


class Seat:
    """One rank of a group.

    Attributes:
        rank: the production one.
        scripts: what is to come of its sequences.
        plan: of the step under way; None: it idles in it, or the group is in a jump.
        running, computed: int64[n], int32[n], of the jump under way: who decodes, and from which position on.
        kv_events: what the rank has said of its prefix cache and nobody took yet; None: it says nothing.
    """

    __slots__ = ("computed", "kv_events", "plan", "rank", "running", "scripts")

    def __init__(self, rank: Rank, scripts: Scripts) -> None:
        self.rank, self.scripts = rank, scripts
        self.plan: Plan | None = None
        self.running: Slots = _NO_SLOTS
        self.computed: Int32s = _NOBODY
        self.kv_events: deque[KvEvent] | None = None

    def publish(self) -> None:
        """From now on say what the prefix cache remembers and forgets."""
        self.kv_events, self.rank.scheduler.pool.journal = deque(), []

    def publish_step_ends(self, ends: Int64s | Sequence[int]) -> None:
        """The steps that have just been taken ended then."""
        journal = self.rank.scheduler.pool.journal
        if journal and self.kv_events is not None:
            self.kv_events.extend(KvEvent(int(ends[e.step]), e.is_stored, e.block_hash) for e in journal)
            journal.clear()

    def add(self, request: Request, script: Script, now_ns: int) -> int:
        """Put a request in the waiting queue. Returns its serial.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        serial = self.rank.add(request, now_ns)
        self.scripts.expect(serial, script)
        return serial

    def forget_ended(self, output: StepOutput) -> None:
        """Drop the scripts of the sequences that have ended."""
        for sequence, reason in zip(output.sequences, output.finish_reasons, strict=True):
            if reason is not None:
                self.scripts.forget(sequence.serial)


class FusedSeat(Seat):
    """A rank of a group that keeps step.

    Attributes:
        device: answers its items from scripts; the group says when.
        jumps: takes many of the rank's decode steps at once.
    """

    __slots__ = ("device", "jumps")

    def __init__(self, settings: SchedulerSettings) -> None:
        self.device = ScriptedDevice(settings.block_size)
        scheduler = Scheduler(settings)
        self.jumps = DecodeJumps(scheduler)
        super().__init__(Rank(scheduler, FusedExecutor(self.device)), self.device)


class Group:
    """Ranks that keep step: all begin a step together, and the busiest sets its end. One rank is the usual case.

    The driver calls `turn` when the time is `next_ns`, and `add` when a request arrives.

    Args:
        settings: of each rank.
        prices: what steps take, and how many ranks there are.
        jump: take steady steps at once.

    Attributes:
        tells_prefill: True.
        next_ns: when the step or jump under way ends; None: nothing is under way.
        began_ns: when it began.
        ends: int64[k], when each step of the jump under way ends; None: a single step is under way, or nothing.
    """

    tells_prefill = True

    def __init__(self, settings: SchedulerSettings, prices: Prices, *, jump: bool = True) -> None:
        self.seats = [FusedSeat(settings) for _ in range(prices.num_ranks)]
        self.next_ns: int | None = None
        self.began_ns = 0
        self._prices = prices
        self._jumps = jump
        self._has_newcomer = False  # it will most likely enter: to ask how long nobody does is for nothing
        self.ends: Int64s | None = None
        self._num_taken = 0  # steps of the jump that `catch_up` has taken
        self._touched_ns = FOREVER_NS  # when the next step ends that takes or fills a block; only if they publish

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Put a request in the waiting queue of a rank; the jump under way ends with the step under way.

        Returns:
            Its serial there.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        self._has_newcomer = True
        if self.next_ns is None:
            self.next_ns = now_ns
        elif self.ends is not None:
            self.ends = self.ends[: int(self.ends.searchsorted(now_ns)) + 1]
            self.next_ns = int(self.ends[-1])
        return serial

    def turn(self, now_ns: int) -> list[StepOutput]:
        """What was under way is over, and the next step or jump begins. Returns what each rank's requests gained.

        Of a jump only the sequences that ended are told.
        """
        outputs = [self._collect(seat, now_ns) for seat in self.seats]
        self.began_ns = now_ns
        num_steps, until_ns = self._steady(now_ns) if self._jumps and not self._has_newcomer else STEPWISE
        self._has_newcomer = False
        if num_steps:
            ends = self._prices.decode_steps_ns([seat.computed for seat in self.seats], num_steps).cumsum() + now_ns
            if until_ns < ends[-1]:  # a step that begins at that time or later is not steady any more
                ends = ends[: int(ends.searchsorted(until_ns)) + 1]
            self.ends, self.next_ns, self._num_taken = ends, int(ends[-1]), 0
            self._touched_ns = self._next_touch_ns()
        else:
            self.ends, self._touched_ns = None, FOREVER_NS
            self._begin(now_ns)
        return outputs

    def catch_up(self, before_ns: int) -> None:
        """Take the steps of the jump that ended before `before_ns`, so that what they publish can be heard.

        A jump in two parts has the effect of one. The last step is never taken here: only `turn` ends sequences.
        """
        if before_ns <= self._touched_ns:
            return  # they have nothing to say
        assert self.ends is not None, "only a jump touches blocks on its way"
        num_ended = min(int(self.ends.searchsorted(before_ns)), len(self.ends) - 1)
        for seat in self.seats:
            if len(seat.running):
                self._advance(seat, num_ended)
                seat.computed = seat.computed + (num_ended - self._num_taken)
        self._num_taken = num_ended
        self._touched_ns = self._next_touch_ns()

    def _next_touch_ns(self) -> int:
        assert self.ends is not None, "a jump is under way"
        num_steps = len(self.ends)
        for seat in self.seats:
            if seat.kv_events is not None and len(seat.running):
                capacity = seat.rank.scheduler.table.capacity.take(seat.running)
                quiet = steps_without_blocks(seat.computed, capacity, seat.rank.scheduler.settings.block_size)
                num_steps = min(num_steps, self._num_taken + quiet)
        return int(self.ends[num_steps]) if num_steps < len(self.ends) else FOREVER_NS

    def _advance(self, seat: FusedSeat, num_ended: int) -> StepOutput:
        """Take the steps of the jump up to number `num_ended` that were not taken yet."""
        assert self.ends is not None, "a jump is under way"
        num_steps = num_ended - self._num_taken
        told, finished = seat.device.complete_steps(seat.running, seat.computed, num_steps)
        output = seat.jumps.advance(num_steps, told, finished)
        seat.publish_step_ends(self.ends[self._num_taken : num_ended])
        return output

    def _collect(self, seat: FusedSeat, now_ns: int) -> StepOutput:
        seat.plan = None
        if self.ends is None:
            output = seat.rank.collect(now_ns)
            seat.publish_step_ends((now_ns,))
        elif len(seat.running):
            output = self._advance(seat, len(self.ends))
        else:
            return StepOutput()
        seat.forget_ended(output)
        return output

    def _steady(self, now_ns: int) -> Horizon:
        """Coming steps that are all alike, those that begin before a time; none: the next has to be scheduled."""
        most, until_ns = 0, FOREVER_NS
        for seat in self.seats:
            scheduler = seat.rank.scheduler
            seat.running, seat.computed = _NO_SLOTS, _NOBODY
            if not scheduler.has_work:
                continue
            num_steps, own_until_ns = seat.jumps.horizon(now_ns)
            if num_steps == 0:
                return STEPWISE
            seat.running = scheduler.table.running
            seat.computed = scheduler.table.num_computed.take(seat.running)
            num_steps = min(num_steps, seat.device.steps_until_finish(seat.running, seat.computed))
            if num_steps == 0:
                return STEPWISE
            most, until_ns = min(most or _LONGEST_JUMP, num_steps), min(until_ns, own_until_ns)
        return Horizon(most, until_ns)

    def _begin(self, now_ns: int) -> None:
        """Submit a plan of each rank that has one."""
        self.next_ns = None
        for seat in self.seats:
            seat.plan = seat.rank.begin(now_ns)
        batches = [seat.device.batch for seat in self.seats]
        if any(batch is not None for batch in batches):
            num_moved = max(seat.device.take_num_moved() for seat in self.seats)
            self.next_ns = now_ns + self._prices.move_ns(num_moved) + self._prices.step_ns(batches)
            for seat in self.seats:
                if seat.plan is not None:
                    seat.device.finish_at(self.next_ns)
