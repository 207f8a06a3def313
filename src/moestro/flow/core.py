"""The flow core of one device: events in, commands out. It has no clock, no device and no links.

A device is the home of some tokens, computes experts, or both.

    PlanSubmitted   units of a plan go to the attention of layer 0, or wait until there are rows for them
    attention done  each token waits for its experts: in this device's expert queues, or with other workers (`Send`)
    experts done    contributions arrive at once for own tokens, and leave as a reply for remote ones
    Arrived         a reply brings contributions; a dispatch brings remote tokens
    complete        a unit that lacks no contribution waits for the next attention, which merges them
    sampler done    the units' result leaves the core

Only a `Tick` launches anything: a driver with several events lets the policy choose once, after all of them.

Everything that is not with the device is in a queue, and what runs next is the step policy's choice alone. So to
preempt is not to choose, and whatever was not chosen is exactly where it was.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import earliest
from moestro.core.load_figures import PassCounts
from moestro.core.stages import (
    DISPATCH,
    REPLY,
    Attention,
    AttentionDone,
    Experts,
    ExpertsDone,
    HopMessage,
    Merge,
    Merged,
    Passage,
    Sample,
    StageResult,
    StageShape,
    Stopped,
    join_records,
)
from moestro.core.views import LS, Run, StepPolicy, Wait
from moestro.core.work import Int32s, Plan, PlanWanted, Slots, StepResult
from moestro.errors import InvariantError
from moestro.flow.admission import AdmissionQueue, ReceiveSide, WholePassFastPath
from moestro.flow.dispatcher import Dispatcher, Owed, PeerSettings
from moestro.flow.events import (
    Arrived,
    Command,
    Done,
    Emit,
    Event,
    ItemMaker,
    Launch,
    LaunchedItem,
    PeerLost,
    PlanSubmitted,
    Store,
    TableChanged,
    Tick,
    Withdraw,
)
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.passed_over import PassedOver, Tokens
from moestro.flow.remote_tokens import Pairs, RemoteTokens, all_pairs, split_pairs
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]

_ALONE = 0  # number of a worker without peers
_EMITTING = (Sample, Passage)  # items that may end in a result of units


class FlowCore:
    """Runs any number of plans at once, token batch by token batch.

    Args:
        shape: of the device.
        policy: chooses what runs next.
        launch_ahead: items with the device at once. With 1, each choice sees all results. With 2, an accelerator has
            its next item while the host takes in the last one's result.
        peers: the device's place in a group. None means that it is alone and has all experts.
    """

    def __init__(
        self, shape: StageShape, policy: StepPolicy, launch_ahead: int = 1, peers: PeerSettings | None = None
    ) -> None:
        self.shape = shape
        self._policy, self._launch_ahead, self._peers = policy, launch_ahead, peers
        self._pool = TokenPool(shape, peers.num_workers if peers and peers.counts_visits else 0)
        self._remote = RemoteTokens(shape.num_places, shape.num_remote_places, peers.num_workers if peers else 1)
        self._queues = MicroQueues(shape, self._pool, self._remote)
        self._passed_over = PassedOver(self._pool, self._remote, self._queues, peers.worker if peers else None)
        self._dispatcher = Dispatcher(peers, self._pool) if peers else None
        self._receiver = ReceiveSide(peers, self._remote, self._queues) if peers else None
        self._waiting = AdmissionQueue(self._pool)
        self._items = ItemMaker(shape, self._pool, self._remote, self._queues, is_alone=peers is None)
        self._whole_pass = WholePassFastPath(shape, policy, self._pool, self._waiting, self._queues, self._items)
        self._inbox: list[tuple[HopMessage, int]] = []  # messages and when they arrived
        self._launched: deque[LaunchedItem] = deque()
        self._num_withdrawn = 0  # launched items of which it is not known how far they came
        self._lacks_places = False  # nothing that waits can run, until something happens
        self._wait_until_ns: int | None = None  # the policy's last `Wait.until_ns`
        self._ask_again_ns: int | None = None  # the earliest `Run.ask_again_ns` of what is launched
        self._num_experts = peers.table.num_experts if peers else shape.num_experts
        self._counts = self._no_counts()

    def _no_counts(self) -> Int64s | None:
        return np.zeros((self.shape.num_layers, self._num_experts), np.int64) if self._num_experts else None

    # --- what a driver asks -----------------------------------------------------------------------------------------

    @property
    def num_plans(self) -> int:
        """Plans submitted some of whose units are not done."""
        return self._pool.num_entries + len(self._waiting) + self._whole_pass.is_running

    @property
    def is_shared(self) -> bool:
        """Whether tokens of several plans, or remote ones, are here, so that some may be passed over by others."""
        return self._remote.num_free < self.shape.num_remote_places or self.num_plans > 1

    @property
    def num_launched(self) -> int:
        """Items with the device."""
        return len(self._launched)

    @property
    def num_dropped(self) -> int:
        """Messages and records that were repeated, or that came for tokens that were given up."""
        return sum(each.num_dropped for each in (self._dispatcher, self._receiver) if each is not None)

    @property
    def is_settled(self) -> bool:
        """Implement `Dispatcher.is_settled`."""
        return self._dispatcher is None or self._dispatcher.is_settled

    def is_slot_idle(self, layer: int, slot: int) -> bool:
        """Whether no pair waits in an expert's slot, and no item with the device has any of it."""
        items = [launched.item for launched in self._launched]
        is_running = any(isinstance(each, Experts) and each.layer == layer and slot in each.experts for each in items)
        return not is_running and not self._queues.num_waiting_in(layer, slot)

    @property
    def pass_counts(self) -> PassCounts:
        """Totals since the start."""
        return self._passed_over.counts

    def waiting_by_layer(self, now_ns: int) -> tuple[Int64s, Int64s]:
        """Implement `MicroQueues.waiting_by_layer`."""
        return self._queues.waiting_by_layer(now_ns)

    @property
    def wake_ns(self) -> int | None:
        """Time at which the policy wants to choose even if no event comes. None means no such time."""
        return earliest(self._wait_until_ns, self._ask_again_ns)

    def wants_tick(self, now_ns: int) -> bool:
        """Whether a `Tick` asks the policy: the device has room, or the policy set a time that has come."""
        return self.has_room or ((wake_ns := self.wake_ns) is not None and now_ns >= wake_ns)

    def wanted_plan(self) -> PlanWanted | None:
        """The plan that would be welcome now.

        A home in a group wants one whenever it has rows, because units enter again as soon as they have a token. A
        device that is alone keeps batches whole: it wants a plan when nothing is inside, or one of latency-sensitive
        units that passes best effort. A policy with `overlaps_prefill` wants one as soon as no decode is inside.
        """
        free_rows = self._pool.num_free_rows - self._waiting.num_tokens
        if self._peers is not None or (
            self._policy.overlaps_prefill and not self._pool.num_decodes and not len(self._waiting)
        ):
            return PlanWanted(free_rows) if free_rows > 0 else None
        if self.num_plans == 0:
            return PlanWanted()
        return None if self._waiting.is_passing else PlanWanted(service_class=LS)

    @property
    def may_emit(self) -> bool:
        """Whether an item with the device ends in a result of units."""
        return any(isinstance(launched.item, _EMITTING) for launched in self._launched) if self._launched else False

    @property
    def has_room(self) -> bool:
        """Whether the device could take another item, and tokens wait for it that may be able to run."""
        # What a withdrawn item did not do must be known first: the next one might complete a unit that lacks it.
        if self._num_withdrawn or len(self._launched) >= self._launch_ahead:
            return False
        return bool((self._queues.num_waiting and not self._lacks_places) or self._inbox or len(self._waiting))

    # --- events -----------------------------------------------------------------------------------------------------

    def on_event(self, now_ns: int, event: Event) -> list[Command]:
        """Take note of `event`, and say what is to be done about it, in order."""
        if isinstance(event, Arrived):  # until it is taken in, all runs and waits as before: nothing to settle
            return self._receive(now_ns, event.message)
        self._passed_over.elapse(now_ns)
        if not (isinstance(event, Done) and isinstance(event.result, StepResult)):
            self._whole_pass.settle()
        self._lacks_places &= isinstance(event, Tick)
        commands: list[Command] = []
        match event:
            case Done():
                self._take(now_ns, event.result, commands)
            case Tick():
                self._open_inbox(now_ns, commands)
                self._choose(now_ns, commands)
            case PlanSubmitted(plan=plan):
                self._submit(plan, now_ns, commands)
            case TableChanged(table, is_near):
                assert self._dispatcher is not None, "a device that is alone has no table"
                self._open_inbox(now_ns, commands)
                self._send_again(self._dispatcher.change_table(table, is_near), now_ns, commands)
            case PeerLost(worker):
                assert self._dispatcher is not None, "a device that is alone has no peers"
                self._open_inbox(now_ns, commands)
                self._send_again(self._dispatcher.lose(worker), now_ns, commands)
        # A device that works when it is polled hands out a result with the time at which it began the last piece. So
        # the time after a result belongs to that result's item, until the next event says what runs.
        if self._launched or not isinstance(event, Done):
            self._observe()
        return commands

    def _observe(self) -> None:
        may_pass = self._passed_over.may_happen and (self._peers is not None or self._pool.num_entries > 1)
        self._passed_over.observe([self._items.tokens_of(each) for each in self._launched] if may_pass else [])

    def recall(self, slots: Slots) -> Slots:
        """Forget the units of `slots`, as if they had never been submitted.

        Returns:
            The slots of which that is so; the units of the others are with the device, or are not known.
        """
        self._lacks_places = False
        self._whole_pass.settle()
        recalled = [self._waiting.remove_units(slots)]
        ids = self._pool.find(slots)
        for launched in self._launched:
            ids = np.setdiff1d(ids, self._items.tokens_of(launched).ids)
        if len(ids):
            self._passed_over.forget(Tokens(ids))
            recalled.append(self._pool.columns.slot[ids])
            self._queues.attention.drop(ids)
            self._queues.experts.drop(self._pool.places_of(ids))
            self._pool.leave(ids)
        return np.concatenate(recalled)

    # --- plans ------------------------------------------------------------------------------------------------------

    def _submit(self, plan: Plan, now_ns: int, commands: list[Command]) -> None:
        num_tokens = plan.num_tokens
        if num_tokens > self.shape.num_rows:
            raise InvariantError(f"a plan of {num_tokens} tokens on a device of {self.shape.num_rows} rows")
        if num_tokens > self.shape.num_places and plan.units.num_tokens.max() > self.shape.num_places:
            raise InvariantError(f"a unit longer than the {self.shape.num_places} tokens that fit in a layer")
        if self._whole_pass.waits:
            self._admit(self._whole_pass.came_ns)
        self._waiting.append(plan)
        self._whole_pass.came_ns = now_ns
        if not self._whole_pass.waits:
            self._admit(now_ns)
        # The plan may be more urgent than the rest of what runs: then the policy chooses again.
        if self._runs_best_effort() and LS in plan.units.service_class:
            self._withdraw(commands)

    def _runs_best_effort(self) -> bool:
        if not self._launched or not self._passed_over.may_happen:
            return False
        return any(self._items.has_best_effort_batches(launched) for launched in self._launched)

    def _withdraw(self, commands: list[Command]) -> None:
        self._ask_again_ns = None
        if any(isinstance(launched.item, Experts | Passage) for launched in self._launched):
            self._num_withdrawn = len(self._launched)
            self._passed_over.count_withdrawal()
            commands.append(Withdraw())

    def _admit(self, now_ns: int) -> None:
        for ids in self._waiting.admit():
            self._queues.attention.add(0, ids, now_ns)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, now_ns: int, message: HopMessage) -> list[Command]:
        """Keep a message until the policy chooses, or take it in at once if it may be more urgent than what runs."""
        commands: list[Command] = []
        self._lacks_places = False
        self._inbox.append((message, now_ns))  # several are taken in at the cost of one
        # What runs is checked first, because that costs nothing where all tokens are of one class.
        if message.hop.kind == DISPATCH and self._runs_best_effort() and LS in message.records["service_class"]:
            self._passed_over.elapse(now_ns)
            self._open_inbox(now_ns, commands)
            self._withdraw(commands)
        return commands

    def _open_inbox(self, now_ns: int, commands: list[Command]) -> None:
        if self._inbox:
            inbox, self._inbox = self._inbox, []
            replies = [message for message, _ in inbox if message.hop.kind == REPLY]
            if replies:
                self._take_replies(now_ns, replies, commands)
            if len(replies) < len(inbox):
                self._take_dispatches([each for each in inbox if each[0].hop.kind == DISPATCH], commands)

    def _take_dispatches(self, arrived: list[tuple[HopMessage, int]], commands: list[Command]) -> None:
        assert self._receiver is not None, "a device that is alone has no remote tokens"
        for message, at_ns in arrived:
            given_up = self._receiver.take(message, at_ns)
            if len(given_up):
                self._passed_over.forget(Tokens(remote=given_up))
        commands += self._receiver.admit(self._waiting.take_entries)

    def _take_replies(self, now_ns: int, replies: list[HopMessage], commands: list[Command]) -> None:
        assert self._dispatcher is not None, "a device that is alone gets no replies"
        kept = []
        for message in replies:
            counts, sends = self._dispatcher.accept(message.hop)
            commands += sends
            kept += [message] if counts and len(message.records) else []
        if kept:
            self._contribute(now_ns, kept, commands)

    def _contribute(self, now_ns: int, replies: list[HopMessage], commands: list[Command]) -> None:
        """Take in the contributions of replies."""
        assert self._dispatcher is not None, "a device that is alone gets no replies"
        sizes = [len(message.records) for message in replies]
        records = join_records([message.records for message in replies])
        workers = np.array([message.hop.src for message in replies], np.int16).repeat(np.array(sizes))
        owed = self._dispatcher.owed(records, workers)
        if not len(owed):
            return
        ends, are_all_owed = list(accumulate(sizes)), len(owed) == len(records)
        if not are_all_owed:
            records, ends = records.take(owed), owed.searchsorted(ends).tolist()
        places, choices = records["place"].astype(np.int32), records["choice"].astype(np.int32)
        for message, begin, end in zip(replies, [0, *ends], ends, strict=False):
            if end > begin:
                part = slice(begin, end)
                rows = None if are_all_owed else records["row"][part].astype(np.int64)
                commands.append(Store(message.tensor, rows, places[part], choices[part]))
        self._pool.passed_elsewhere(places, records["waited_us"])
        complete = self._pool.arrive(places, choices)
        if len(complete):
            self._join_next_layer(now_ns, complete)

    def _join_next_layer(self, now_ns: int, ids: Int64s) -> None:
        """Units that lack no contribution wait for the next attention."""
        layers = self._pool.layer_of(ids)
        for layer in np.bincount(layers).nonzero()[0].tolist():
            is_here = layers == layer
            self._queues.attention.add(layer + 1, ids if is_here.all() else ids[is_here], now_ns)

    def _send_again(self, owed: list[Owed], now_ns: int, commands: list[Command]) -> None:
        assert self._dispatcher is not None, "only a home with peers sends"
        for each in owed:
            own, sends = self._dispatcher.send_again(each)
            self._queues.experts.add(self._pool, each.layer, own)
            commands += sends

    # --- results ----------------------------------------------------------------------------------------------------

    def _take(self, now_ns: int, result: StageResult, commands: list[Command]) -> None:
        if not self._launched:
            raise InvariantError("a result of nothing")
        launched = self._launched.popleft()
        self._ask_again_ns = None  # the policy chooses again after each result
        self._num_withdrawn = max(self._num_withdrawn - 1, 0)
        match launched.item, result:
            case Attention() as item, AttentionDone(topk_ids=topk_ids):
                if topk_ids is None:
                    self._pool.release_places(item.merges)
                    self._queues.attention.add(item.layer + 1, launched.ids, now_ns)
                else:
                    self._dispatch(now_ns, launched, item.layer, topk_ids, commands)
            case Experts() as item, ExpertsDone(num_batches=num_batches):
                self._take_experts(now_ns, item, num_batches, commands)
            case Merge(), Merged():
                pass
            case Passage() as item, Stopped():
                self._take_stopped(now_ns, launched, item, result, commands)
            case ((Sample() | Passage()), StepResult(expert_counts=counts)):
                self._count(counts)
                visits = self._pool.visits_of(launched.ids, result.slot)
                commands.append(Emit(msgspec.structs.replace(result, expert_counts=self._counts, visits=visits)))
                self._counts = self._no_counts()
                if not self._whole_pass.end():
                    self._pool.leave(launched.ids)
            case _:
                raise InvariantError(f"{type(result).__name__} for {type(launched.item).__name__}")

    def _count(self, counts: Int64s | None) -> None:
        if counts is not None and self._counts is not None:
            self._counts += counts

    def _dispatch(
        self, now_ns: int, launched: LaunchedItem, layer: int, topk_ids: Int32s, commands: list[Command]
    ) -> None:
        """Tokens leave their gate: their pairs wait here, or with other workers."""
        assert isinstance(launched.item, Attention)
        assert self._counts is not None, "experts of a dense network"
        places = launched.item.places
        self._counts[layer] += np.bincount(topk_ids.reshape(-1), minlength=self._num_experts)
        self._pool.queued_ns[launched.ids] = now_ns
        if self._dispatcher is None:
            self._pool.expect(launched.ids, places, layer, topk_ids, _ALONE)
            self._queues.experts.add(self._pool, layer, all_pairs(places, topk_ids), now_ns)
            return
        self._dispatcher.set_own_backlog(self._queues.num_pairs)
        own, sends = self._dispatcher.dispatch(layer, launched.ids, places, topk_ids)
        self._queues.experts.add(self._pool, layer, own, now_ns)
        commands += sends

    def _arrive(self, layer: int, places: Int32s, choices: Int32s, now_ns: int) -> None:
        complete = self._pool.arrive(places, choices)
        if len(complete):
            self._queues.attention.add(layer + 1, complete, now_ns)

    def _take_experts(self, now_ns: int, item: Experts, num_batches: int, commands: list[Command]) -> None:
        pairs = Pairs(item.places, item.choices, item.experts.repeat(item.counts))
        if num_batches < len(item.experts):
            num_done = int(item.counts[:num_batches].sum())
            self._give_back(item.layer, pairs.part(num_done, len(pairs.places)))
            pairs = pairs.part(0, num_done)
        own, remote = split_pairs(pairs, self.shape.num_places)
        if len(remote.places):
            assert self._receiver is not None, "a device that is alone has no remote tokens"
            commands += self._receiver.reply(item.layer, remote)
        if self._receiver is not None:
            commands += self._receiver.admit(self._waiting.take_entries)
        if len(own.places):
            self._arrive(item.layer, own.places, own.choices, now_ns)

    def _give_back(self, layer: int, pairs: Pairs) -> None:
        """Pairs that the device has not computed wait again."""
        own, remote = split_pairs(pairs, self.shape.num_places)
        self._queues.experts.add(self._pool, layer, own)
        if len(remote.places):
            assert self._receiver is not None, "a device that is alone has no remote tokens"
            self._receiver.give_back(layer, remote)

    def _take_stopped(
        self, now_ns: int, launched: LaunchedItem, item: Passage, stopped: Stopped, commands: list[Command]
    ) -> None:
        self._count(stopped.expert_counts)
        if stopped.topk_ids is None:
            self._pool.release_places(self._pool.merges(self._pool.wave(launched.ids)))
            self._queues.attention.add(stopped.layer, launched.ids, now_ns)
            return
        places, topk_ids, layer = item.places, stopped.topk_ids, stopped.layer
        self._pool.queued_ns[launched.ids] = now_ns
        self._pool.expect(launched.ids, places, layer, topk_ids, _ALONE)
        is_open = topk_ids >= stopped.first_open
        assert self._counts is not None, "experts of a dense network"
        self._counts[layer] += np.bincount(topk_ids[is_open], minlength=self._num_experts)
        self._queues.experts.add(self._pool, layer, all_pairs(places, topk_ids, is_open))
        token, choice = np.nonzero(~is_open)
        self._arrive(layer, places[token], choice.astype(np.int32), now_ns)

    # --- choices ----------------------------------------------------------------------------------------------------

    def _choose(self, now_ns: int, commands: list[Command]) -> None:
        """Launch what the policy wants, as long as the device has room."""
        if self._ask_again_ns is not None and now_ns >= self._ask_again_ns:
            self._withdraw(commands)
        self._wait_until_ns = None
        if self._whole_pass.waits:
            choice, launched = self._whole_pass.choose(now_ns)
            if launched is None:
                self._admit(self._whole_pass.came_ns)
            if not self._follow(choice, commands, launched):
                return
        elif len(self._waiting):
            self._admit(now_ns)
        while self.has_room and self._queues.num_waiting:
            if (merge := self._items.free_places()) is not None:
                self._launch(merge, commands)
                continue
            table = self._queues.table()
            if not np.count_nonzero(table.runnable):
                self._lacks_places = True  # a result or a message will free some
                return
            if not self._follow(self._policy(table, now_ns), commands):
                return

    def _follow(self, choice: Run | Wait, commands: list[Command], launched: LaunchedItem | None = None) -> bool:
        """Do what the policy chose, with an item that is made or not. Returns whether it may choose again now."""
        if isinstance(choice, Wait):
            self._wait_until_ns = choice.until_ns
            return False
        self._launch(launched or self._items.make(choice), commands)
        self._ask_again_ns = earliest(self._ask_again_ns, choice.ask_again_ns)
        return True

    def _launch(self, launched: LaunchedItem, commands: list[Command]) -> None:
        self._launched.append(launched)
        commands.append(Launch(launched.item))
