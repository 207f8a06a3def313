"""Admission to one device: plans wait for rows of the network, and dispatches of other homes for remote places.

The contributions of a computed dispatch go back to its home.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import REPLY, Hop, HopMessage, Passage, StageShape
from moestro.core.views import LS, Run, StepPolicy, Wait
from moestro.core.work import Plan, Slots, select_units
from moestro.errors import InvariantError
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.events import ItemMaker, LaunchedItem, Send, Store
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.remote_tokens import Pairs, RemoteTokens
from moestro.flow.token_pool import NO_MERGES, TokenPool

Int64s = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A plan that waits, and its tokens. `passes`: whether it was submitted while others were inside."""

    plan: Plan
    num_tokens: int
    passes: bool


class AdmissionQueue:
    """Plans that wait for rows of a home's token pool; numbers everything that enters its device.

    Args:
        pool: the home's tokens.

    Attributes:
        num_tokens: tokens of the plans that wait.
    """

    def __init__(self, pool: TokenPool) -> None:
        self._pool = pool
        self._waiting: list[_Waiting] = []
        self._passing_entry = -1
        self._num_entries = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_passing(self) -> bool:
        """Whether a plan that was submitted while others were inside is not done."""
        return self._pool.has_entry(self._passing_entry) or any(each.passes for each in self._waiting)

    @property
    def first(self) -> Plan:
        """The plan that has waited for longest."""
        return self._waiting[0].plan

    def drop_first(self) -> None:
        """Take out the plan that has waited for longest."""
        self.num_tokens -= self._waiting.pop(0).num_tokens

    def take_entries(self, count: int = 1) -> int:
        """Number what enters the device now, plans or remote tokens. Returns the first number."""
        self._num_entries += count
        return self._num_entries - count

    def append(self, plan: Plan) -> None:
        """Let a plan wait."""
        num_tokens = plan.num_tokens
        self._waiting.append(_Waiting(plan, num_tokens, bool(self._pool.num_entries or self._waiting)))
        self.num_tokens += num_tokens

    def admit(self) -> list[Int64s]:
        """Let plans in while there are rows: those with a latency-sensitive unit first, then in order.

        Returns:
            The names of each plan's units.
        """
        admitted = []
        waiting = self._waiting
        if len(waiting) > 1:
            waiting = sorted(waiting, key=lambda each: LS not in each.plan.units.service_class)
        for each in tuple(waiting):
            if each.num_tokens > self._pool.num_free_rows:
                break
            self._waiting.remove(each)
            self.num_tokens -= each.num_tokens
            number = self.take_entries()
            if each.passes:
                self._passing_entry = number
            admitted.append(self._pool.enter(number, each.plan.units))
        return admitted

    def remove_units(self, slots: Slots) -> Slots:
        """Forget the units of `slots` that wait, and return their slots."""
        removed = [np.empty(0, np.int64)]
        for each in self._waiting:
            gone = np.isin(each.plan.units.slot, slots)
            if gone.any():
                removed.append(each.plan.units.slot[gone])
                each.plan = Plan(each.plan.step, select_units(each.plan.units, np.flatnonzero(~gone)))
                each.num_tokens = each.plan.num_tokens
        self._waiting = [each for each in self._waiting if len(each.plan.units)]
        self.num_tokens = sum(each.num_tokens for each in self._waiting)
        return np.concatenate(removed)


# A plan that is alone in the network is one item, whose units enter the token pool only if something interrupts it.
#
# Most steps are such plans, and keeping track of their units takes as long as a layer of a small model.


class WholePassFastPath:
    """Lets the policy choose for a plan that waits before an empty network.

    Args:
        shape, policy: of the device. A policy that overlaps prompts and decodes has several plans inside.
        pool, waiting: tokens of the home, and plans that wait.
        queues, items: of the device. The path is closed where the device is not alone.

    Attributes:
        came_ns: when the last plan was submitted.
    """

    def __init__(
        self,
        shape: StageShape,
        policy: StepPolicy,
        pool: TokenPool,
        waiting: AdmissionQueue,
        queues: MicroQueues,
        items: ItemMaker,
    ) -> None:
        self._shape, self._policy, self._pool, self._waiting = shape, policy, pool, waiting
        self._queues, self._items = queues, items
        self._is_possible = items.is_alone and not policy.overlaps_prefill
        self._launched: LaunchedItem | None = None
        self.came_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether a plan of this path is with the device."""
        return self._launched is not None

    @property
    def waits(self) -> bool:
        """Whether all that is here is one plan that waits."""
        return self._is_possible and not self.is_running and len(self._waiting) == 1 and not self._pool.num_entries

    def choose(self, now_ns: int) -> tuple[Run | Wait, LaunchedItem | None]:
        """Ask the policy about the plan that waits, and take it if it passes the network in one go.

        Returns:
            What the policy chose, and the item; None means that the plan has to enter.
        """
        plan = self._waiting.first
        choice = self._policy(self._queues.table_alone(plan.units, self.came_ns), now_ns)
        self._launched = None if isinstance(choice, Wait) else self._items.make_alone(choice, plan)
        if self._launched is not None:
            self._waiting.drop_first()
        return choice, self._launched

    def end(self) -> bool:
        """Note that the result of an item is there. Returns whether it was that of a whole pass."""
        was_running, self._launched = self.is_running, None
        return was_running

    def settle(self) -> None:
        """Give the units the rows and places that their item names, because they may stop on their way."""
        launched = self._launched
        if launched is None:
            return
        assert isinstance(launched.item, Passage)
        wave = self._pool.wave(self._pool.enter(self._waiting.take_entries(), launched.item.units))
        if self._shape.num_chosen:
            self._pool.take_places(wave, NO_MERGES)
        if not np.array_equal(wave.rows, launched.item.rows):
            raise InvariantError("the units of a whole pass have other rows than its item")
        launched.ids = wave.ids
        self.end()


# The tokens of other homes, on a device with experts.

_NO_PLACES = np.empty(0, np.int32)


class ReceiveSide:
    """Keeps the channels from homes: epochs, numbers of messages, and dispatches that wait for places.

    Args:
        peers: the device's place in its group.
        remote: tokens of other homes.
        queues: of the device.
    """

    def __init__(self, peers: PeerSettings, remote: RemoteTokens, queues: MicroQueues) -> None:
        self._peers, self._remote, self._queues = peers, remote, queues
        # Dispatches wait here only until tokens of an older epoch, which the device still computes, have left.
        self._buffer: deque[tuple[HopMessage, int]] = deque()
        self._dispatch_seq = [0] * peers.num_workers
        self._reply_seq = [0] * peers.num_workers
        self.num_dropped = 0

    def take(self, message: HopMessage, at_ns: int) -> NDArray[np.int32]:
        """Take in a dispatch. `admit` then gives it places.

        Returns:
            Places of tokens that their home has given up with this message, int32[n].
        """
        hop, given_up = message.hop, _NO_PLACES
        epoch = self._remote.epoch_of(hop.src)
        if hop.epoch < epoch or (hop.epoch == epoch and hop.seq < self._dispatch_seq[hop.src]):
            self.num_dropped += 1
            return given_up
        if hop.epoch > epoch:
            self._reply_seq[hop.src] = 0
            given_up = self._remote.begin_epoch(hop.src, hop.epoch)
            self._remote.drop(self._queues.experts.drop(given_up))
            self._buffer = deque(each for each in self._buffer if each[0].hop.src != hop.src)
        self._dispatch_seq[hop.src] = hop.seq + 1
        self._buffer.append((message, at_ns))
        return given_up

    def admit(self, take_entries: Callable[[int], int]) -> list[Store]:
        """Give places to the tokens of dispatches in the receive buffer, in order, while there are places.

        Args:
            take_entries: numbers some entries, and returns the first number.
        """
        if not self._buffer:
            return []
        num_free, arrived = self._remote.num_free, list[tuple[HopMessage, int]]()
        while self._buffer and (num_rows := self._buffer[0][0].hop.num_rows) <= num_free:
            arrived.append(self._buffer.popleft())
            num_free -= num_rows
        if not arrived:
            return []
        places, pairs = self._remote.admit(take_entries(len(arrived)), arrived)
        self._queue(arrived, pairs)
        stores, begin = [], 0
        for message, _ in arrived:
            end = begin + message.hop.num_rows
            stores.append(Store(message.tensor, None, places[begin:end], None))
            begin = end
        return stores

    def give_back(self, layer: int, pairs: Pairs) -> None:
        """Let pairs that the device has not computed wait again, except those that their homes have given up."""
        is_wanted = self._remote.is_wanted(pairs.places)
        self._queues.experts.add(self._remote, layer, pairs.at(is_wanted.nonzero()[0]))
        self._remote.drop(pairs.places[~is_wanted])

    def _queue(self, arrived: list[tuple[HopMessage, int]], pairs: Pairs) -> None:
        """Put pairs into the queues of their layers, those of one layer together."""
        layers, since_ns = [message.hop.layer for message, _ in arrived], [at_ns for _, at_ns in arrived]
        all_since_ns = since_ns[0] if since_ns.count(since_ns[0]) == len(since_ns) else None
        if layers.count(layers[0]) == len(layers):
            self._queues.experts.add(self._remote, layers[0], pairs, all_since_ns)
            return
        layer_of = np.array(layers).repeat([len(message.records) for message, _ in arrived])
        for layer in sorted(set(layers)):
            index = (layer_of == layer).nonzero()[0]
            self._queues.experts.add(self._remote, layer, pairs.at(index), all_since_ns)

    def reply(self, layer: int, pairs: Pairs) -> list[Send]:
        """Send the contributions of computed pairs to the homes of their tokens."""
        replies = self._remote.answer(pairs)
        depths = self._queues.depths() if replies else ()
        return [
            Send(
                HopMessage(
                    Hop(
                        kind=REPLY,
                        src=self._peers.worker,
                        dst=reply.home,
                        epoch=reply.epoch,
                        seq=self._next_seq(reply.home),
                        layer=layer,
                        num_rows=len(reply.records),
                        dtype=self._peers.dtype,
                        credits=reply.credits,
                        depths=depths,
                        num_taken=self._dispatch_seq[reply.home],
                    ),
                    reply.records,
                ),
                reply.places,
                reply.choices,
            )
            for reply in replies
        ]

    def _next_seq(self, home: int) -> int:
        self._reply_seq[home] += 1
        return self._reply_seq[home] - 1
