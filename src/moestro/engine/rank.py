"""One rank: a scheduler and an executor, and the one loop step that joins them. Its driver owns time and transport.

The fused executor runs one whole forward pass for each plan; tests compare the other executors with it. The driver also
publishes the changes of the rank's prefix cache, which are collected here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import LoadFigures, PaceCounts, PassCounts
from moestro.core.request import NewOutputs, Output, Request
from moestro.core.stages import StagedDevice
from moestro.core.views import BE, ONE, StepPolicy, all_nonzero, all_true, has_true, true_rows
from moestro.core.work import (
    FROM_STEP_BEFORE,
    Device,
    Executor,
    Forward,
    Int32s,
    IsWanted,
    Plan,
    PlanWanted,
    Slots,
    StepResult,
    never_wanted,
)
from moestro.engine.admission import AdmissionCandidate
from moestro.engine.block_pool import CacheEvent, Place
from moestro.engine.event_recorder import EventRecorder
from moestro.engine.host_tier import MeasuredPrices
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import COMPUTED, BlockContent
from moestro.engine.settings import SchedulerSettings
from moestro.engine.steps import StepOutput, make_units, outputs_of
from moestro.errors import CopyError, InvariantError
from moestro.flow.executor import FlowExecutor

_ANY_PLAN, _NEXT_PLAN = PlanWanted(), PlanWanted(follows=True)


class FusedExecutor:
    """Launches each plan on the device as one item.

    Args:
        device: computes the items.
        runs_ahead: whether a plan that follows the one in flight is launched behind it, so that the device need not
            wait for the host. The device then has to know `core.work.FROM_STEP_BEFORE`.

    Attributes:
        pass_counts: zeros, because no plan passes another.
        num_pieces: plans submitted.
    """

    pass_counts = PassCounts()

    def __init__(self, device: Device, *, runs_ahead: bool = False) -> None:
        self._device = device
        self._runs_ahead = runs_ahead
        self._results: deque[StepResult] = deque()
        self._num_in_flight = 0
        self._lost: StepResult | None = None  # of the plan submitted last, whose copies failed
        self.num_pieces = 0

    def wanted_plan(self) -> PlanWanted | None:
        """Want one plan at a time, and one that follows it."""
        if self._num_in_flight == 0:
            return _ANY_PLAN
        if self._lost is not None:
            return None
        return _NEXT_PLAN if self._runs_ahead and self._num_in_flight == 1 else None

    def submit(self, plan: Plan, now_ns: int) -> None:
        """Launch `plan`, after its KV copies. If these fail, its units return without having been computed."""
        self.num_pieces += 1
        self._num_in_flight += 1
        if plan.moves is not None:
            try:
                self._device.move_blocks(plan.moves, now_ns)
            except CopyError:
                self._lost = StepResult(plan.units.slot, failed=plan.moves)
                return
        self._device.launch(Forward(plan.units), now_ns)

    def start(self, now_ns: int) -> None:
        """Do nothing; a plan starts when it is submitted."""

    def recall(self, slots: Slots, now_ns: int) -> Slots:
        """Recall no unit; a forward pass that has begun runs to its end."""
        return np.empty(0, np.int64)

    def poll(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> StepResult | None:
        """Take the oldest result that is ready, or None."""
        self._results.extend(self._device.poll(now_ns))
        if self._num_in_flight == 1 and self._lost is not None:  # plans return in the order in which they came
            self._results.append(self._lost)
            self._lost = None
        if not self._results:
            return None
        self._num_in_flight -= 1
        return self._results.popleft()

    def ready_at_ns(self) -> int | None:
        """Implement `Executor.ready_at_ns`."""
        if self._lost is not None and self._num_in_flight == 1:
            return 0
        return self._device.ready_at_ns() if self._num_in_flight else FOREVER_NS


# Of the sequences of a step that goes ahead without those that follow a grammar: each of these then takes every other
# step, which costs more tokens than the host's time is worth if they are many.
_MOST_WAITING_SHARE = 1 / 8


class NextStep:
    """Plans the step that follows the one in flight, where nothing but sampled tokens is unknown.

    The policies see the sequences as they will be when the step in flight is done, without those that reach their last
    token in it. A sequence that ends with it by a stop token or an abort, which the host learns later, costs one row of
    the next step. `Scheduler.update` drops that row, and releases the sequence's blocks with it.

    Args:
        scheduler: whose plan is in flight. Its executor launches plans in order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table, self._pool, self._waiting = scheduler.table, scheduler.pool, scheduler.waiting

    def plan(self, now_ns: int) -> Plan | None:
        """Plan the next step, or return None where the step in flight has to end first.

        It has to where many sequences need their tokens on the host, where a waiting sequence may preempt others or
        gets its prefix from the step in flight, and where blocks are too few.
        """
        scheduler = self._scheduler
        if self._table.num_hashed or self._may_preempt(now_ns):
            return None
        slots = self._without_waiting(self._going_on())
        if slots is None:
            return None
        view, num_free = scheduler.views.running(slots, now_ns), self._pool.num_free
        candidates: list[AdmissionCandidate] = []
        if len(self._waiting):
            if scheduler.state.recorder is not None:
                scheduler.state.recorder.look(self._waiting, now_ns)
            room = scheduler.batch_policy.room(view, scheduler.limits)
            candidates = scheduler.admission.candidates(room, scheduler.limits, now_ns)
            if candidates and self._fills_prefix(candidates):
                return None
            view = scheduler.views.with_candidates(view, candidates, now_ns) if candidates else view
        chunk = scheduler.batch_policy.plan(view, scheduler.limits)
        num_tokens = chunk[: len(slots)]
        if not all_nonzero(num_tokens):
            slots, num_tokens = slots[num_tokens > 0], num_tokens[num_tokens > 0]
        if not self._allocate_blocks(slots):
            return None
        if candidates:
            slots, num_tokens = scheduler.with_admitted(candidates, slots, num_tokens, chunk, num_free, now_ns)
        return self._plan_of(slots, num_tokens) if len(slots) else None

    def _without_waiting(self, slots: Slots) -> Slots | None:
        """Leave out sequences whose grammar reads the token that they sample now. Returns None where these are many.

        Sequences that sit out until their masks are ready are left out too, as in any step.
        """
        table = self._table
        if table.num_sitting_out:
            table.look_for_masks()
            slots = slots[~table.sits_out[slots]]
        if not table.num_editing:
            return slots
        waits = self._samples(slots) & table.has_grammar[slots]
        if not has_true(waits):
            return slots
        return None if np.count_nonzero(waits) > _MOST_WAITING_SHARE * len(slots) else slots[~waits]

    def _samples(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n], which of `slots` have all their known tokens computed by the step in flight."""
        samples: NDArray[np.bool_] = self._table.progress(slots)[0] == self._table.num_tokens[slots]
        return samples

    def _may_preempt(self, now_ns: int) -> bool:
        """Whether a waiting sequence may preempt another, which has to be idle for that."""
        scheduler = self._scheduler
        if not len(self._waiting):
            return False
        may_make_way = scheduler.preemption.makes_way and self._table.num_be > 0
        return may_make_way or scheduler.admission.lacks_room_for_claims(scheduler.limits, now_ns)

    def _fills_prefix(self, candidates: list[AdmissionCandidate]) -> bool:
        """Whether the step in flight fills a prompt's block that a candidate lacks, and would find afterwards."""
        table, running, size = self._table, self._table.running, self._table.block_size
        computed, after = table.num_computed[running], table.progress(running)[0]
        filled = set[bytes]()
        if self._scheduler.settings.enable_prefix_caching:
            for row in true_rows((after - computed > ONE) & (after // size > computed // size)):
                first, end = computed.item(row) // size, after.item(row) // size
                filled.update(table.at(running.item(row)).hashes[first:end])
        for candidate in candidates if filled else ():
            hashes, num_prefix = candidate.sequence.readable_hashes(), candidate.needs.num_prefix
            if num_prefix < len(hashes) and hashes[num_prefix] in filled:
                return True
        return False

    def _going_on(self) -> Slots:
        """Slots of the running sequences that have more to compute after the step in flight, as far as is known."""
        table, running = self._table, self._table.running
        goes_on = ~self._samples(running) | (table.num_tokens[running] + ONE < table.last_num_tokens[running])
        if self._scheduler.state.num_leaving:
            goes_on &= ~table.are_leaving(running)
        return running if all_true(goes_on) else running[goes_on]

    def _allocate_blocks(self, slots: Slots) -> bool:
        """Give a block to each sequence that lacks one. Returns False, and changes nothing, if the pool has too few."""
        table = self._table
        takers: list[int] = slots[table.progress(slots)[1] > table.capacity[slots]].tolist()
        if len(takers) > self._pool.num_free:
            return False
        if takers:
            table.add_blocks(takers, self._pool.allocate_many(len(takers)))
        return True

    def _plan_of(self, slots: Slots, num_tokens: Int32s) -> Plan:
        """Make the plan. `Scheduler.update` replaces FROM_STEP_BEFORE in the table by the tokens."""
        table = self._table
        following = slots[self._samples(slots)]
        table.token_ids[following, table.num_tokens[following]] = FROM_STEP_BEFORE
        self._scheduler.decode_run.end()
        self._scheduler.counts.num_steps_ahead += 1
        return self._scheduler.plan_of(make_units(table, slots, num_tokens))


class ExpertObserver(Protocol):
    """Learns which experts the tokens of each step visited; `worker.rank_builder` has one."""

    def observe(self, result: StepResult) -> None:
        """Take in a step with `expert_counts`. An error must not leave this method: it would end the rank."""
        ...

    def skip(self, num_steps: int) -> None:
        """Take in steps of the rank's group in which the rank had no tokens."""
        ...


class Rank:
    """Serves requests: it takes results, schedules and submits, again and again.

    Args:
        scheduler: chooses the tokens of each plan.
        executor: computes plans, and says when it wants another.
        passes_decodes: whether latency-sensitive units come before best-effort ones in every step, and pass a step for
            decodes alone too. Their answers then come faster, in small batches, while best effort stands still. If
            not, that holds until they have their first token; later tokens come with those of best effort.

    Attributes:
        expert_counts: int64[num_layers, num_experts], tokens that each logical expert computed so far. None means a
            dense network.
        expert_observer: learns the counts of each step; None means that nothing does.
        step_prices: learns from the duration of each step what a prompt's computation takes. None means that nothing
            does.
        pace_counts: supplier of the counts of a paced device; returns None for another device.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, passes_decodes: bool = True) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._next_step = NextStep(scheduler)
        self._passes_decodes = passes_decodes
        self._has_news = False  # something happened since the last plan for which more units might be scheduled
        self.expert_counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None
        self.expert_observer: ExpertObserver | None = None
        self.step_prices: MeasuredPrices | None = None
        self._num_ended = 0  # results since the last plan, whose durations are known when the caller reads its clock
        self.pace_counts: Callable[[], PaceCounts | None] = lambda: None

    def add(self, request: Request, now_ns: int, num_output_tokens: int | None = None) -> int:
        """Put a request in the waiting queue.

        Args:
            num_output_tokens: as in `Scheduler.add`.

        Returns:
            Its serial, which its units carry: a device that holds scripts finds the sequence's script by it.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        self._has_news = True
        return self.scheduler.add(request, num_output_tokens)

    def take_given_way(self) -> list[str]:
        """Return the ids of requests that left the full queue since the last call, for requests of other clients."""
        if not self.scheduler.given_way:
            return []
        return [sequence.request.request_id for sequence in self.scheduler.take_given_way()]

    def abort(self, request_id: str, now_ns: int) -> None:
        """Drop a request within one step; unknown ids are ignored. No output follows."""
        self.scheduler.abort(request_id, now_ns)
        self._has_news = True  # it held what another may wait for

    def forget_cache(self) -> None:
        """Let no request read KV that was computed before, because the network now computes in another way."""
        self.scheduler.state.forget_cache()

    def measure_prices(self, host_block_ns: int | None) -> None:
        """Copy a prefix from host memory where that takes less time than its computation does in this rank's steps.

        Its plans return whole and in order.

        Args:
            host_block_ns: measured time of the copy of a KV block from host memory. None means that a copy always pays.
        """
        if host_block_ns is not None:
            self.step_prices = self.scheduler.state.host.prices = MeasuredPrices(host_block_ns)

    def wake(self, step: int) -> None:
        """Take part in a step of the rank's group; see `engine.lock_step`.

        Raises:
            InvariantError: the rank is alone.
        """
        raise InvariantError("a rank without a group got the order to take part in a step")

    def step(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> list[Output]:
        """Take what is ready and submit the next plan. Returns what requests gained.

        Args:
            is_wanted: whether the caller has something to say (a new request). An executor that works while it is
                polled then returns at its next checkpoint.
        """
        outputs = list(self.outputs(now_ns, is_wanted))
        self.begin(now_ns)
        return outputs

    def outputs(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> NewOutputs:
        """Take what is ready, the first half of `step`, as messages."""
        return outputs_of(self.collect(now_ns, is_wanted))

    def collect(self, now_ns: int, is_wanted: IsWanted = never_wanted) -> StepOutput:
        """Take what is ready; messages are made of it for a server alone."""
        if self.scheduler.table.num_units_in_flight:
            self._plan(now_ns)  # before anything else runs: what came meanwhile may be more urgent
        result = self.executor.poll(now_ns, is_wanted)
        recorder = self.scheduler.state.recorder
        if recorder is not None:
            recorder.look_for_pass(self.executor.pass_counts.num_passes, now_ns)
        if result is None:
            return StepOutput()
        self._has_news = True
        self._num_ended += 1
        if result.expert_counts is not None:
            if self.expert_counts is None:
                self.expert_counts = np.zeros_like(result.expert_counts)
            self.expert_counts += result.expert_counts
            if self.expert_observer is not None:
                self.expert_observer.observe(result)
        if recorder is not None and result.visits is not None:
            recorder.visited(self.scheduler.table.at_all(result.slot), result.visits)
        return self.scheduler.update(result, now_ns)

    def begin(self, now_ns: int) -> Plan | None:
        """Submit the next plan, if the executor wants one: the second half of `step`. Returns the plan."""
        if self.step_prices is not None:
            for _ in range(self._num_ended):
                self.step_prices.ended(now_ns)
        self._num_ended = 0
        plan = self._plan(now_ns)
        self.executor.start(now_ns)
        return plan

    def _plan(self, now_ns: int) -> Plan | None:
        """Submit the plan that the executor wants, if there is one."""
        wanted = self.executor.wanted_plan()
        if wanted is None or not self._is_worth_it(wanted, now_ns):
            return None
        if wanted.follows:
            return self._follow(now_ns)
        plan = self.scheduler.schedule(now_ns, wanted.service_class, wanted.max_tokens)
        self._has_news = False
        if plan is None:
            return None
        if wanted.service_class is None:
            # Requests without room in this plan may follow it where plans overlap, or pass it.
            overlaps = wanted.max_tokens is not None
            self._has_news = self.scheduler.has_unplanned if overlaps else self.scheduler.waiting.num_ls > 0
            plan = plan if self._passes_decodes else self._hastening_prompts(plan)
        elif (recorder := self.scheduler.state.recorder) is not None:
            table = self.scheduler.table
            recorder.may_pass(table.at_all(plan.units.slot), table.at_all(table.in_flight(BE)))
        self._submit(plan, now_ns)
        next_wanted = self.executor.wanted_plan()
        self._has_news |= next_wanted is not None and next_wanted.follows
        return plan

    def _follow(self, now_ns: int) -> Plan | None:
        """Submit the plan that follows the one in flight, if nothing but its tokens is unknown."""
        plan = self._next_step.plan(now_ns)
        self._has_news = False
        if plan is not None:
            self._submit(plan, now_ns)
        return plan

    def _submit(self, plan: Plan, now_ns: int) -> None:
        if self.step_prices is not None:
            self.step_prices.began(plan, now_ns)
        self.executor.submit(plan, now_ns)

    def _is_worth_it(self, wanted: PlanWanted, now_ns: int) -> bool:
        """Whether scheduling may find units for the wanted plan, and these are worth splitting the batch in flight."""
        table = self.scheduler.table
        if not table.num_units_in_flight:
            return self.scheduler.has_work
        if not self._has_news:
            return False
        if wanted.service_class is None:
            return True
        if not len(table.in_flight(BE)):
            return False
        if self._passes_decodes or self.scheduler.has_urgent_prompts(now_ns):
            return True
        self._has_news = False
        return False

    def _hastening_prompts(self, plan: Plan) -> Plan:
        """Return `plan` with only sequences without a token as latency-sensitive, so that the others stay one batch."""
        no_token = self.scheduler.table.has_no_token(plan.units.slot)
        classes = np.where(no_token, plan.units.service_class, np.uint8(BE))
        units = msgspec.structs.replace(plan.units, service_class=classes)
        return msgspec.structs.replace(plan, units=units)

    def ready_at_ns(self) -> int | None:
        """Time of the next result or choice, as `Executor.ready_at_ns`."""
        return self.executor.ready_at_ns()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    @property
    def num_steps(self) -> int:
        """Pieces of work since the start; stands still when there is work and nothing can be computed."""
        return self.executor.num_pieces

    def stats(self) -> LoadFigures:
        """Figures for routers, metrics and log lines."""
        scheduler, counts, table = self.scheduler, self.scheduler.counts, self.scheduler.table
        waiting, host = scheduler.waiting, scheduler.state.host
        num_known, num_prompt_left = scheduler.decode_run.num_known, 0
        if num_known is None:
            known, computed = table.growth[: COMPUTED + 1].take(table.running, axis=1)
            num_known, num_prompt_left = int(np.add.reduce(known)), _sum_of_prompts(known - computed)
        return LoadFigures(
            num_running=len(table.running),
            num_waiting=len(waiting),
            kv_usage=1 - scheduler.pool.num_free / scheduler.pool.num_blocks,
            queued_prefill_tokens=waiting.num_tokens - waiting.num_kept + num_prompt_left,
            num_tokens=waiting.num_tokens + num_known,
            num_preemptions=counts.num_preemptions,
            num_queried_tokens=counts.num_queried_tokens,
            num_hit_tokens=counts.num_hit_tokens,
            num_host_queried_tokens=counts.num_queried_tokens - counts.num_hit_tokens if host.num_blocks else 0,
            num_host_hit_tokens=counts.num_host_hit_tokens,
            host_usage=host.num_used_blocks / host.num_blocks if host.num_blocks else 0.0,
            num_stored_bytes=host.num_stored_blocks * scheduler.settings.block_bytes,
            num_loaded_bytes=host.num_loaded_blocks * scheduler.settings.block_bytes,
            num_failed_copies=counts.num_failed_copies,
            num_kept_tokens=counts.num_kept_tokens,
            num_restored_tokens=counts.num_restored_tokens,
            num_dropped_rows=counts.num_dropped_rows,
            num_steps_ahead=counts.num_steps_ahead,
            pass_counts=self.executor.pass_counts,
        )


def _sum_of_prompts(left: Int32s) -> int:
    """Tokens to compute of the sequences that have more than one; in the usual step there is none."""
    return int(left.sum(where=left > 1)) if np.count_nonzero(left > 1) else 0


def recorder_of(rank: Rank) -> EventRecorder:
    """Let a rank note what happens to its requests from now on. Returns the notes."""
    settings = rank.scheduler.settings
    order = rank.scheduler.waiting.policy
    recorder = EventRecorder(order, settings.scheduling_policy, settings.evict_policy)
    rank.scheduler.record_with(recorder)
    return recorder


def build_rank(
    settings: SchedulerSettings, device: Device, *, runs_ahead: bool = False, host_block_ns: int | None = None
) -> Rank:
    """Build a rank in `fused` mode on `device`.

    Args:
        runs_ahead: as in `FusedExecutor`.
        host_block_ns: as in `Rank.measure_prices`.
    """
    rank = Rank(Scheduler(settings), FusedExecutor(device, runs_ahead=runs_ahead))
    rank.measure_prices(host_block_ns)
    return rank


def build_preemptive_rank(
    settings: SchedulerSettings,
    device: StagedDevice,
    policy: StepPolicy,
    launch_ahead: int = 1,
    *,
    passes_decodes: bool = True,
) -> Rank:
    """Build a rank in `preemptive` mode on `device`.

    Args:
        policy: what the device runs next.
        launch_ahead: items with the device at once; 2 on an accelerator (see `FlowCore`).
        passes_decodes: see `Rank`.
    """
    executor = FlowExecutor(device, policy, launch_ahead)
    return Rank(Scheduler(settings, executor.recall), executor, passes_decodes=passes_decodes)


class StoredBlocks(NamedTuple):
    """Consecutive blocks of a prompt that entered the prefix cache.

    Attributes:
        parent: name of the block before the first one. None means that the first one begins a prompt.
        names: hashes of the blocks.
        token_ids: packed int32, the tokens of all blocks.
        cache_salt: salt of the names, where the first block begins a prompt.
        is_on_host: whether they entered host memory. They have neither parent nor tokens then, which were reported when
            they entered the device's cache.
    """

    parent: bytes | None
    names: tuple[bytes, ...]
    token_ids: bytes
    cache_salt: str | None
    is_on_host: bool = False


class RemovedBlocks(NamedTuple):
    """Blocks that left the prefix cache on the device, or in host memory."""

    names: tuple[bytes, ...]
    is_on_host: bool = False


class CacheChanges(NamedTuple):
    """Blocks by which a prefix cache differs from an earlier state of itself, as packed hashes in the order of events.

    Attributes:
        stored: blocks that are on the device now.
        removed: blocks that no tier has any more.
        hosted: blocks that host memory alone has now.
    """

    stored: bytes = b""
    removed: bytes = b""
    hosted: bytes = b""


UNCHANGED = CacheChanges()


def changes_of(journal: Sequence[CacheEvent]) -> CacheChanges:
    """Return the net changes of a journal. A block that entered and left in it counts as removed, which is harmless."""
    place_of: dict[bytes, Place] = {}
    for event in journal:
        place = event.place
        if place is not None:
            place_of.pop(event.block_hash, None)  # so that the order is that of the last events
            place_of[event.block_hash] = place
    by_place: dict[Place, list[bytes]] = {place: [] for place in Place}
    for name, last in place_of.items():
        by_place[last].append(name)
    return CacheChanges(*(b"".join(by_place[place]) for place in (Place.DEVICE, Place.GONE, Place.HOST)))


class CacheEvents:
    """Collects the events of `scheduler`'s prefix cache, from an empty cache on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._journal: list[CacheEvent] = []
        self._contents: dict[bytes, BlockContent] = {}
        scheduler.pool.journal, scheduler.state.block_contents = self._journal, self._contents

    def take(self) -> list[StoredBlocks | RemovedBlocks]:
        """The events since the last call, in order; consecutive blocks are merged into one event."""
        events: list[StoredBlocks | RemovedBlocks] = []
        for each in self._journal:
            last = events[-1] if events else None
            if each.is_on_host or not each.is_stored:
                kind = StoredBlocks if each.is_stored else RemovedBlocks
                if isinstance(last, kind) and last.is_on_host == each.is_on_host:
                    events[-1] = last._replace(names=(*last.names, each.block_hash))
                else:
                    events.append(_without_tokens(each))
                continue
            content = self._contents[each.block_hash]
            follows = isinstance(last, StoredBlocks) and not last.is_on_host and content.parent == last.names[-1]
            if isinstance(last, StoredBlocks) and follows:
                names, token_ids = (*last.names, each.block_hash), last.token_ids + content.token_ids
                events[-1] = last._replace(names=names, token_ids=token_ids)
            else:
                events.append(StoredBlocks(content.parent, (each.block_hash,), content.token_ids, content.cache_salt))
        self._journal.clear()
        self._contents.clear()
        return events


def _without_tokens(event: CacheEvent) -> StoredBlocks | RemovedBlocks:
    """Make the event of a block whose tokens are not reported with it."""
    if event.is_stored:
        return StoredBlocks(None, (event.block_hash,), b"", None, event.is_on_host)
    return RemovedBlocks((event.block_hash,), event.is_on_host)
