"""Ranks on virtual time: the production scheduler, executor and cache over scripted devices, in steps or jumps.

A *step* is schedule, launch, update. A *jump* is a run of decode steps that are all alike, as the schedulers' `horizon`
finds them. The cost model prices its steps when the jump begins; `advance` applies their effect when the last one ends.
A *leap* is a jump that begins with the steps of prompts, where only first tokens are of interest outside meanwhile.
A request that arrives in between shortens the jump to the current step. Nothing has to be undone, because no state has
changed yet. With `jump=False` every step is taken on its own; tests use it as the oracle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.request import Request, Script
from moestro.core.work import Int32s, Plan, Slots, named_request_key
from moestro.cost.model import Batch, CostModel, GroupCostModel, Int64s, Ints
from moestro.cost.priced_device import ScriptedDevice, Scripts
from moestro.cost.tables import MeasuredCost, OtherGpuCost
from moestro.engine.block_pool import Place
from moestro.engine.decode_horizon import STEPWISE, DecodeJumps, Horizon, Leap, steps_without_blocks
from moestro.engine.host_tier import LinearPrices
from moestro.engine.rank import FusedExecutor, Rank
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import Sequence as EngineSequence
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput


class Prices(Protocol):
    """Prices steps of `num_ranks` ranks that begin and end together. Each argument holds one item for each rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that step together."""
        ...

    @property
    def copies_beside(self) -> bool:
        """Whether copies to and from host memory run beside steps; otherwise a step waits for all of its plan's."""
        ...

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Return the duration of a step, ns. A batch of None is an idle rank; at least one rank has a batch."""
        ...

    def move_ns(self, num_tokens: int) -> int:
        """Return the duration of copying the KV of `num_tokens` tokens between GPU and host, ns."""
        ...

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Return the duration of each coming decode step, ns. An empty start is an idle rank.

        Returns:
            int64[num_steps], a new array that the caller may change.
        """
        ...

    def notes(self) -> list[str]:
        """Return limits of the prices given so far, for readers of the results; usually none."""
        ...


_TRIAL_TOKENS = 1024  # of a prompt, in the step whose price per token counts


def load_prices(prices: Prices, block_size: int) -> LinearPrices:
    """Prices by which a rank, beside idle ones, copies a prefix from host memory or computes it again.

    A token costs what a step of twice as many tokens takes more: a step reads the weights in any case.
    """
    small, large = (_prompt_ns(prices, num_tokens) for num_tokens in (_TRIAL_TOKENS, 2 * _TRIAL_TOKENS))
    return LinearPrices(prices.move_ns(block_size), (large - small) / _TRIAL_TOKENS)


def _prompt_ns(prices: Prices, num_tokens: int) -> int:
    batch = Batch(np.zeros(1, np.int32), np.array([num_tokens], np.int32))
    return prices.step_ns([batch, *[None] * (prices.num_ranks - 1)])


class OneRank:
    """Prices of a rank that steps alone.

    Args:
        cost: prices of its steps.
        copies_beside: as in `Prices`.
    """

    num_ranks = 1

    def __init__(self, cost: CostModel, *, copies_beside: bool = True) -> None:
        self._cost = cost
        self.copies_beside = copies_beside

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Implement `Prices.step_ns`."""
        (batch,) = batches
        assert batch is not None, "a step without a batch"
        return self._cost.step_ns(batch)

    def move_ns(self, num_tokens: int) -> int:
        """Implement `Prices.move_ns`."""
        return self._cost.move_ns(num_tokens)

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Implement `Prices.decode_steps_ns`."""
        return self._cost.decode_steps_ns(starts[0], num_steps)

    def notes(self) -> list[str]:
        """Note steps that were larger than those of the cost table."""
        warning = self._cost.warning() if isinstance(self._cost, MeasuredCost | OtherGpuCost) else None
        return [] if warning is None else [warning]


class Barrier:
    """Prices of an expert-parallel group in lock-step: the busiest rank sets the duration of a step."""

    copies_beside = True

    def __init__(self, cost: GroupCostModel) -> None:
        self._cost = cost

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return self._cost.num_ep_ranks

    def step_ns(self, batches: Sequence[Batch | None]) -> int:
        """Implement `Prices.step_ns`."""
        return self._cost.group_step_ns(batches)

    def move_ns(self, num_tokens: int) -> int:
        """Implement `Prices.move_ns`."""
        return self._cost.move_ns(num_tokens)

    def decode_steps_ns(self, starts: Sequence[Ints], num_steps: int) -> Int64s:
        """Implement `Prices.decode_steps_ns`."""
        return self._cost.group_decode_steps_ns(starts, num_steps)

    def notes(self) -> list[str]:
        """Return no notes, because a roofline covers every step."""
        return []


def give_prompt_kv(scheduler: Scheduler, request_id: str) -> None:
    """Let a waiting sequence start with the KV of all its prompt but the last token.

    The prefix cache counts these tokens as hits. A preempted sequence computes its tokens again like any other.
    `Scheduler.check` rejects such a sequence while it waits, because its KV lies nowhere.

    Args:
        scheduler: scheduler of the rank; no plan has been made since the request was added.
        request_id: the request.
    """
    sequence = scheduler.by_id[request_id]
    scheduler.waiting.remove(sequence)
    sequence.num_kept = sequence.num_tokens - 1
    scheduler.waiting.add(sequence)


_LONGEST_JUMP = 1024  # steps; pricing more is mostly wasted, because the next arrival cuts the jump
_NO_SLOTS = np.empty(0, np.int64)
_NO_LENGTHS = np.empty(0, np.int32)


class KvEvent(NamedTuple):
    """A block that a tier of a rank's prefix cache stores or removes.

    Attributes:
        at_ns: time of the event, which is the end of its step.
        place: where the cache has the block after it.
        block_hash: hash of the block.
    """

    at_ns: int
    place: Place
    block_hash: bytes


class Seat:
    """One rank of a group.

    Attributes:
        rank: production rank.
        scripts: output tokens of its sequences.
        plan: plan of the current step. None means that the rank idles, or that the group is in a jump.
        running: slots of the sequences that decode in the current jump, int64[n].
        computed: their computed tokens at its start, int32[n].
        kv_events: events of the prefix cache that no reader has taken yet. None means that the rank publishes none.
        leap: steps from the plan on that are taken at once. None means that there are none.
        first_tokens: end of the step and sequence of each first token of the leap, in order, until a reader takes it.
        may_leap: whether first tokens alone are of interest outside of the rank before a leap ends.
        has_prompt_kv: whether requests enter with the KV of their prompts, as `sim.dummy_kv` describes.
        expert_pressure: load of the devices that compute the experts of the rank's tokens, over the mean device's, as
            `core.expert_pressure` defines it. None means unknown.
    """

    __slots__ = (
        "computed", "expert_pressure", "first_tokens", "has_prompt_kv", "kv_events", "leap", "may_leap", "plan", "rank",
        "running", "scripts",
    )  # fmt: skip

    def __init__(self, rank: Rank, scripts: Scripts) -> None:
        self.rank, self.scripts = rank, scripts
        self.plan: Plan | None = None
        self.running: Slots = _NO_SLOTS
        self.computed: Int32s = _NO_LENGTHS
        self.kv_events: deque[KvEvent] | None = None
        self.leap: Leap | None = None
        self.first_tokens: list[tuple[int, EngineSequence]] = []
        self.may_leap = self.has_prompt_kv = False
        self.expert_pressure: float | None = None

    def publish(self) -> None:
        """Publish the prefix cache's events from now on."""
        self.kv_events, self.rank.scheduler.pool.journal = deque(), []

    def publish_step_ends(self, ends: Int64s | Sequence[int]) -> None:
        """Date the KV events of the steps just taken by the ends of these steps."""
        journal = self.rank.scheduler.pool.journal
        if journal and self.kv_events is not None:
            self.kv_events.extend(KvEvent(int(ends[e.step]), at, e.block_hash) for e in journal if (at := e.place))
            journal.clear()

    def add(self, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to the waiting queue, and return its serial number.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        serial = self.rank.add(request, now_ns, script.num_output_tokens)
        if self.has_prompt_kv:
            give_prompt_kv(self.rank.scheduler, request.request_id)
        if script.request_key is None:  # a serial number would give the request other experts on another engine
            script = msgspec.structs.replace(script, request_key=named_request_key(request.request_id))
        self.scripts.expect(serial, script, request.num_prompt_tokens)
        return serial

    def forget_ended(self, output: StepOutput) -> None:
        """Drop the scripts of the sequences that have ended."""
        for row in output.finish_reasons:
            self.scripts.forget(output.sequences[row].serial)


class FusedSeat(Seat):
    """A rank of a group whose ranks step together.

    Attributes:
        device: device that answers from scripts, at times that the group sets.
        jumps: takes many decode steps of the rank at once.
    """

    __slots__ = ("device", "jumps")

    def __init__(self, settings: SchedulerSettings) -> None:
        self.device = ScriptedDevice(settings.block_size)
        scheduler = Scheduler(settings)
        self.jumps = DecodeJumps(scheduler)
        super().__init__(Rank(scheduler, FusedExecutor(self.device)), self.device)


class CopyQueue:
    """The copies between a group's ranks and their host memory, one plan's after the other's.

    Args:
        prices: durations of the copies, and whether they run beside steps.

    Attributes:
        may_plan_ns: earliest time at which the next plan may be made, by an engine that plans beside the step before:
            the start of that step, or the arrival of the newest request.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._free_ns = 0
        self.may_plan_ns = 0

    def until_ns(self, num_kept: int, num_restored: int, now_ns: int) -> int:
        """Begin the copies of a plan, and return the time until which its step waits for them.

        Args:
            num_kept, num_restored: tokens whose KV goes to the host, and then tokens whose KV comes from there.
            now_ns: end of the step before.
        """
        kept_ns, restored_ns = (self._prices.move_ns(number) for number in (num_kept, num_restored))
        if not self._prices.copies_beside:
            return now_ns + kept_ns + restored_ns
        self._free_ns = max(self._free_ns, self.may_plan_ns) + kept_ns + restored_ns
        return max(now_ns, self._free_ns) if num_restored else now_ns


class Group:
    """Ranks that step together: all begin a step at the same time, and the busiest sets its end.

    The usual group has one rank. The driver calls `turn` at `next_ns`, and `add` when a request arrives.

    Args:
        settings: scheduler settings of each rank.
        prices: durations of steps, and the number of ranks.
        jump: whether like decode steps are taken at once.

    Attributes:
        tells_prefill: True.
        steps_together: whether there are several ranks.
        next_ns: end of the current step or jump. None means that the group is idle.
        began_ns: its start.
        ends: end of each step of the current jump, int64[k]. None means that no jump is running.
    """

    tells_prefill = True

    def __init__(self, settings: SchedulerSettings, prices: Prices, *, jump: bool = True) -> None:
        self.seats = [FusedSeat(settings) for _ in range(prices.num_ranks)]
        self.steps_together = prices.num_ranks > 1
        if settings.num_host_blocks:
            for seat in self.seats:
                seat.rank.scheduler.state.host.prices = load_prices(prices, settings.block_size)
        self.next_ns: int | None = None
        self.began_ns = 0
        self._prices = prices
        self._jumps = jump
        self._copies = CopyQueue(prices) if settings.num_host_blocks else None
        self._has_newcomer = False  # the next step most likely admits it, so no horizon is computed
        self.ends: Int64s | None = None
        self._starts: list[Int32s] = []  # computed tokens of each seat's sequences when the jump began
        self._num_taken = 0  # steps of the jump that `catch_up` has taken
        # End of the jump's next step that takes or fills a block, if a seat publishes events. None means not known yet.
        self._touched_ns: int | None = None

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to a rank's waiting queue, and end the current jump with its current step.

        Returns:
            Serial number of the request on that rank.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        self._has_newcomer = True
        if self._copies is not None:
            self._copies.may_plan_ns = now_ns
        if self.next_ns is None:
            self.next_ns = now_ns
        elif self.ends is not None:
            self.ends = self.ends[: bisect_left(self.ends.data, now_ns) + 1]
            self.next_ns = self.ends.item(-1)
            first_tokens = self.seats[seat].first_tokens
            while first_tokens and first_tokens[-1][0] > self.next_ns:
                first_tokens.pop()
        return serial

    def turn(self, now_ns: int, until_ns: int = FOREVER_NS) -> list[StepOutput]:
        """End the current step or jump, start the next one, and return the step output of each rank.

        The output of a jump names only the sequences that ended. `until_ns` changes nothing: a jump ends early when a
        request is added (`add`).
        """
        if self._copies is not None:
            last_began_ns = self.began_ns if self.ends is None or len(self.ends) == 1 else self.ends.item(-2)
            self._copies.may_plan_ns = max(self._copies.may_plan_ns, last_began_ns)
        outputs = []
        for seat in self.seats:  # mostly one, for which a comprehension takes several times as long
            output = self._collect(seat, now_ns)
            outputs.append(output)
        self.began_ns = now_ns
        horizon = self._steady(now_ns) if self._jumps and not self._has_newcomer else STEPWISE
        self._has_newcomer = False
        if horizon.num_steps:
            self._jump(now_ns, horizon)
        elif not (self.steps_together or self.seats[0].rank.has_work):
            self.ends = self.next_ns = None
        else:
            self.ends = None
            self._begin(now_ns)
        return outputs

    def _jump(self, now_ns: int, horizon: Horizon) -> None:
        """Begin a jump over the steps of `horizon`."""
        num_steps = horizon.num_steps if horizon.num_steps < _LONGEST_JUMP else _LONGEST_JUMP
        ends = self._prices.decode_steps_ns(self._starts, num_steps)
        ends[0] += now_ns
        ends = np.add.accumulate(ends)
        last_ns = ends.item(-1)
        if horizon.until_ns < last_ns:  # a step that begins at that moment or later is scheduled anew
            ends = ends[: bisect_left(ends.data, horizon.until_ns) + 1]
            last_ns = ends.item(-1)
        self.ends, self.next_ns, self._num_taken = ends, last_ns, 0
        self._touched_ns = None

    def catch_up(self, before_ns: int) -> None:
        """Take the steps of the jump that ended before `before_ns`, so that their KV events are available.

        A jump taken in two parts has the same effect. Its last step is left to `turn`, which alone ends sequences.
        """
        if self.ends is None:
            return
        if self._touched_ns is None:
            self._touched_ns = self._next_touch_ns(self.ends)
        if before_ns <= self._touched_ns:
            return  # the steps until then publish no event
        num_ended = min(int(self.ends.searchsorted(before_ns)), len(self.ends) - 1)
        for seat in self.seats:
            if len(seat.running):
                self._advance(seat, num_ended)
                seat.computed = seat.computed + (num_ended - self._num_taken)
        self._num_taken = num_ended
        self._touched_ns = None

    def _next_touch_ns(self, ends: Int64s) -> int:
        num_steps = len(ends)
        for seat in self.seats:
            if seat.kv_events is not None and len(seat.running):
                capacity = seat.rank.scheduler.table.capacity[seat.running]
                quiet = steps_without_blocks(seat.computed, capacity, seat.rank.scheduler.settings.block_size)
                num_steps = min(num_steps, self._num_taken + quiet)
        return int(ends[num_steps]) if num_steps < len(ends) else FOREVER_NS

    def _advance(self, seat: FusedSeat, num_ended: int) -> StepOutput:
        """Take the steps of the jump that are not taken yet, up to step `num_ended`."""
        assert self.ends is not None, "a jump is under way"
        num_steps = num_ended - self._num_taken
        device, block_hashes = seat.device, None
        if device.num_naming:
            block_hashes = device.filled_blocks(seat.running, seat.computed, num_steps)
        output = seat.jumps.advance(num_steps, block_hashes)
        if seat.kv_events is not None:
            seat.publish_step_ends(self.ends[self._num_taken : num_ended])
        return output

    def _collect(self, seat: FusedSeat, now_ns: int) -> StepOutput:
        had_plan, seat.plan = seat.plan is not None, None
        if self.ends is None:
            if not had_plan:
                return StepOutput()
            output = seat.rank.collect(now_ns)
            if seat.kv_events is not None:
                seat.publish_step_ends((now_ns,))
        elif seat.leap is not None:
            output = self._land(seat, seat.leap, len(self.ends), now_ns)
        elif len(seat.running):
            output = self._advance(seat, len(self.ends))
        else:
            return StepOutput()
        if output.finish_reasons:
            seat.forget_ended(output)
        return output

    def _land(self, seat: FusedSeat, leap: Leap, num_steps: int, now_ns: int) -> StepOutput:
        """End a leap after `num_steps` steps."""
        result, device, block_hashes = seat.rank.executor.poll(now_ns), seat.device, None
        if device.num_naming:
            assert result is not None, "the first step of the leap has ended"
            num_prompt_steps = min(num_steps, len(leap.chunks))
            computed = leap.starts[num_prompt_steps]
            block_hashes = device.filled_blocks(leap.running, computed, num_steps - num_prompt_steps)
            for row, packed in result.block_hashes.items():  # those of the first step
                slot = leap.running.item(row)
                block_hashes[slot] = packed + block_hashes.get(slot, b"")
        seat.leap = None
        return seat.jumps.land(leap, num_steps, block_hashes)

    def _steady(self, now_ns: int) -> Horizon:
        """Return the number of coming steps that are alike, and the time before which they must begin."""
        nearest, starts = STEPWISE, self._starts
        starts.clear()
        for seat in self.seats:
            scheduler = seat.rank.scheduler
            seat.running, seat.computed = _NO_SLOTS, _NO_LENGTHS
            if not len(scheduler.table.running):
                if len(scheduler.waiting):
                    return STEPWISE
                starts.append(_NO_LENGTHS)
                continue
            own = seat.jumps.horizon(now_ns)
            if own.num_steps == 0:
                return STEPWISE
            seat.running, seat.computed = scheduler.table.running, seat.jumps.computed
            starts.append(seat.computed)
            nearest = own if nearest is STEPWISE else nearest.and_of(own)
        return nearest

    def _begin(self, now_ns: int) -> None:
        """Submit the plan of each rank that has one."""
        self.next_ns = None
        begun, batches, num_kept, num_restored = [], [], 0, 0
        for seat in self.seats:
            seat.plan, device = seat.rank.begin(now_ns), seat.device
            batches.append(device.batch)
            if seat.plan is not None:
                begun.append(device)
                kept, restored = device.take_num_moved()
                num_kept, num_restored = max(num_kept, kept), max(num_restored, restored)
        if not begun:
            return
        if self._copies is not None and (num_kept or num_restored):
            now_ns = self._copies.until_ns(num_kept, num_restored, now_ns)
        self.next_ns = now_ns + self._prices.step_ns(batches)
        for device in begun:
            device.finish_at(self.next_ns)
        if self._jumps and not self.steps_together and (seat := self.seats[0]).may_leap:
            self._leap(seat)

    def _leap(self, seat: FusedSeat) -> None:
        """Go on behind the plan that has just begun, as far as nothing is decided."""
        assert seat.plan is not None, "a step has begun"
        assert self.next_ns is not None, "a step has begun"
        leap = seat.jumps.leap(seat.plan)
        if leap is None:
            return
        num_decode_steps = min(leap.num_decode_steps, _LONGEST_JUMP)
        num_prompt_steps = len(leap.chunks)
        ends = np.empty(num_prompt_steps + num_decode_steps, np.int64)
        ends[0] = self.next_ns
        for step in range(1, num_prompt_steps):
            ends[step] = self._prices.step_ns([Batch(leap.starts[step], leap.chunks[step])])
        if num_decode_steps:
            ends[num_prompt_steps:] = self._prices.decode_steps_ns(leap.starts[-1:], num_decode_steps)
        ends = np.add.accumulate(ends)
        self.ends, self.next_ns, seat.leap = ends, ends.item(-1), leap
        for step, sequence in leap.first_tokens:
            seat.first_tokens.append((ends.item(step), sequence))


class Ranks(Protocol):
    """Ranks on virtual time. The cluster calls `turn` at `next_ns`, and `add` when a request arrives.

    Attributes:
        began_ns: start of the current step or jump.
        ends: end of each step of the current jump, int64[k]. None means that no jump is running.
        tells_prefill: whether a seat's `plan` runs from `began_ns` on, so that the time of prefill is known.
    """

    began_ns: int
    ends: NDArray[np.int64] | None

    @property
    def next_ns(self) -> int | None:
        """Time of the next `turn`. None means that the ranks are idle until a request arrives."""
        ...

    @property
    def tells_prefill(self) -> bool:
        """Whether the time of prefill is known."""
        ...

    @property
    def steps_together(self) -> bool:
        """Whether several ranks begin every step together."""
        ...

    @property
    def seats(self) -> Sequence[Seat]:
        """The ranks."""
        ...

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to a rank's waiting queue, and return its serial number on that rank.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        ...

    def catch_up(self, before_ns: int) -> None:
        """Take the steps of the current jump that ended before `before_ns`, so that their KV events are available."""
        ...

    def turn(self, now_ns: int, until_ns: int) -> list[StepOutput]:
        """End the current step or jump, start the next one, and return the step output of each rank.

        Args:
            until_ns: time of the next event elsewhere. Until then the ranks may go on alone, as long as no request
                gains a token.
        """
        ...
