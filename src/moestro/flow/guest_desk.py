"""Receives the tokens of other homes, and sends their contributions back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import REPLY, Hop, HopMessage
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.events import Send, Store
from moestro.flow.guests import Guests, Pairs
from moestro.flow.micro_queues import MicroQueues

_NO_GUESTS = np.empty(0, np.int32)


class GuestDesk:
    """Keeps the channels from homes: epochs, numbers of messages, and dispatches that wait for places.

    Args:
        peers: the device's place in its group.
        guests: tokens of other homes.
        queues: of the device.
    """

    def __init__(self, peers: PeerSettings, guests: Guests, queues: MicroQueues) -> None:
        self._peers, self._guests, self._queues = peers, guests, queues
        # Dispatches wait here only until guests of an older epoch, which the device still computes, have left.
        self._lobby: deque[tuple[HopMessage, int]] = deque()
        self._dispatch_seq = [0] * peers.num_workers
        self._reply_seq = [0] * peers.num_workers
        self.num_dropped = 0

    def take(self, message: HopMessage, at_ns: int) -> NDArray[np.int32]:
        """Take in a dispatch. `let_in` then gives it places.

        Returns:
            Places of guests that their home has given up with this message, int32[n].
        """
        hop, given_up = message.hop, _NO_GUESTS
        epoch = self._guests.epoch_of(hop.src)
        if hop.epoch < epoch or (hop.epoch == epoch and hop.seq < self._dispatch_seq[hop.src]):
            self.num_dropped += 1
            return given_up
        if hop.epoch > epoch:
            self._reply_seq[hop.src] = 0
            given_up = self._guests.begin_epoch(hop.src, hop.epoch)
            self._guests.drop(self._queues.experts.drop(given_up))
            self._lobby = deque(each for each in self._lobby if each[0].hop.src != hop.src)
        self._dispatch_seq[hop.src] = hop.seq + 1
        self._lobby.append((message, at_ns))
        return given_up

    def let_in(self, take_entries: Callable[[int], int]) -> list[Store]:
        """Give places to the guests of dispatches in the lobby, in order, while there are places.

        Args:
            take_entries: numbers some entries, and returns the first number.
        """
        if not self._lobby:
            return []
        num_free, arrived = self._guests.num_free, list[tuple[HopMessage, int]]()
        while self._lobby and (num_rows := self._lobby[0][0].hop.num_rows) <= num_free:
            arrived.append(self._lobby.popleft())
            num_free -= num_rows
        if not arrived:
            return []
        places, pairs = self._guests.admit(take_entries(len(arrived)), arrived)
        self._queue(arrived, pairs)
        stores, begin = [], 0
        for message, _ in arrived:
            end = begin + message.hop.num_rows
            stores.append(Store(message.tensor, None, places[begin:end], None))
            begin = end
        return stores

    def give_back(self, layer: int, pairs: Pairs) -> None:
        """Let pairs that the device has not computed wait again, except those that their homes have given up."""
        is_wanted = self._guests.is_wanted(pairs.places)
        self._queues.experts.add(self._guests, layer, pairs.at(is_wanted.nonzero()[0]))
        self._guests.drop(pairs.places[~is_wanted])

    def _queue(self, arrived: list[tuple[HopMessage, int]], pairs: Pairs) -> None:
        """Put pairs into the queues of their layers, those of one layer together."""
        layers, since_ns = [message.hop.layer for message, _ in arrived], [at_ns for _, at_ns in arrived]
        all_since_ns = since_ns[0] if since_ns.count(since_ns[0]) == len(since_ns) else None
        if layers.count(layers[0]) == len(layers):
            self._queues.experts.add(self._guests, layers[0], pairs, all_since_ns)
            return
        layer_of = np.array(layers).repeat([len(message.records) for message, _ in arrived])
        for layer in sorted(set(layers)):
            index = (layer_of == layer).nonzero()[0]
            self._queues.experts.add(self._guests, layer, pairs.at(index), all_since_ns)

    def reply(self, layer: int, pairs: Pairs) -> list[Send]:
        """Send the contributions of computed pairs of guests to their homes."""
        replies = self._guests.answer(pairs)
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
