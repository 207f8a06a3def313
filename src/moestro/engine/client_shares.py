"""Shares of one engine by client: which waiting sequences may claim a place, and whose sequences give way for them.

Nothing here matters while one client has all sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import name_key
from moestro.core.order_contract import OrderPolicy
from moestro.core.views import BatchLimits, ShareView
from moestro.core.work import Slots
from moestro.engine.policy_contract import SharePolicy
from moestro.engine.sequences import Sequence, SequenceTable


class Held(NamedTuple):
    """What the running sequences of each client hold, by number of the client.

    Attributes:
        num_seqs: int64[clients], running sequences.
        num_blocks: float64[clients], KV blocks; a block that several sequences share counts for each of them.
        share: float64[clients], the larger of the parts of all places and of all blocks.
    """

    num_seqs: NDArray[np.int64]
    num_blocks: NDArray[np.float64]
    share: NDArray[np.float64]


class ClientShares:
    """Numbers the clients that have sequences in one engine, and gives each its part of the engine.

    Args:
        policy: divides the engine.
        order: has the weights of clients.
        table: the running sequences.
        num_blocks: KV blocks of the engine.

    Attributes:
        are_needed: whether several clients have sequences, and one of them may not claim all.
        part: float64[clients], part of the engine that each client may claim, by number; 1 for numbers without client.
    """

    def __init__(self, policy: SharePolicy, order: OrderPolicy, table: SequenceTable, num_blocks: int) -> None:
        self._policy, self._order = policy, order
        self._table = table
        self._num_places, self._num_blocks = len(table.sequences), num_blocks
        self._number_of: dict[str | None, int] = {}
        self._clients: list[str | None] = []  # by number
        self._num_seqs: list[int] = []  # by number, waiting and running
        self._free: list[int] = []
        self.are_needed = False
        self.part: NDArray[np.float64] = np.empty(0)

    def join(self, client: str | None) -> int:
        """Count a new sequence of `client`. Returns the client's number."""
        number = self._number_of.get(client)
        if number is None:
            if not self._free:
                self._free.append(len(self._clients))
                self._clients.append(None)
                self._num_seqs.append(0)
            number = self._number_of[client] = self._free.pop()
            self._clients[number] = client
            self._divide()
        self._num_seqs[number] += 1
        return number

    def number_of(self, client: str | None) -> int | None:
        """Return the number of a client. None means that it has no sequence."""
        return self._number_of.get(client)

    def leave(self, number: int) -> None:
        """Count the end of a sequence of the client with this number."""
        self._num_seqs[number] -= 1
        if not self._num_seqs[number]:
            del self._number_of[self._clients[number]]
            self._free.append(number)
            self._divide()

    def _divide(self) -> None:
        """Give each client its part, because a client has come or gone."""
        self.part = np.ones(len(self._clients))
        weights = [self._order.weight(name_key(client)) for client in self._number_of]
        if weights:
            self.part[list(self._number_of.values())] = self._policy(ShareView(np.array(weights)))
        self.are_needed = len(weights) > 1 and bool((self.part < 1).any())

    def held(self) -> Held:
        """What each client's running sequences hold now."""
        table = self._table
        clients, capacity = table.client[table.running], table.capacity[table.running]
        num_seqs = np.bincount(clients, minlength=len(self.part))
        num_blocks = np.bincount(clients, capacity, len(self.part)) / table.block_size
        return Held(num_seqs, num_blocks, np.maximum(num_seqs / self._num_places, num_blocks / self._num_blocks))

    def claims(self, limits: BatchLimits) -> Claims:
        """What clients may claim beside their running sequences, in the next plan."""
        held, table = self.held(), self._table
        num_places = np.ceil(self.part * self._num_places).astype(np.int64)
        places = np.maximum(num_places - held.num_seqs, held.num_seqs == 0)
        waiting = np.array(self._num_seqs) - held.num_seqs
        blocks = self.part * self._num_blocks - held.num_blocks
        left = np.minimum(table.num_tokens[table.running] - table.num_computed[table.running], limits.max_chunk)
        wanted = np.bincount(table.client[table.running], left, len(self.part)).astype(np.float64)
        tokens = np.ceil(self.part * limits.token_budget) - wanted
        return Claims(
            np.minimum(places, waiting), blocks.astype(np.float64), tokens, held.num_seqs == 0, table.block_size
        )

    def over_share(self, slots: Slots) -> Slots:
        """Those of `slots` whose client holds most over its part and runs another sequence too. May be empty.

        A client always keeps a running sequence, so that it gets on whatever the others send.
        """
        held, clients = self.held(), self._table.client[slots]
        excess = np.where(held.num_seqs > 1, held.share / self.part, 0.0)
        present = excess[clients]
        if not len(slots) or present.max() <= 1:
            return slots[:0]
        over: Slots = slots[clients == clients[present.argmax()]]
        return over


class Claims:
    """Places, KV blocks and tokens that clients may claim: each up to its part, and one sequence where it runs none.

    Attributes:
        is_open: bool[clients], whether the client may claim another place.
        num_open: clients that may.
    """

    def __init__(
        self,
        places: NDArray[np.int64],
        blocks: NDArray[np.float64],
        tokens: NDArray[np.float64],
        has_none: NDArray[np.bool_],
        block_size: int,
    ) -> None:
        self._places, self._blocks, self._tokens = places, blocks, tokens
        self._has_none, self._block_size = has_none, block_size
        self.is_open = (places > 0) & (tokens > 0)
        self.num_open = int(np.count_nonzero(self.is_open))

    def take(self, sequence: Sequence) -> bool:
        """Return whether the next waiting sequence of its client may claim a place, and count it.

        A client's later sequences have no claim after one without.
        """
        client = sequence.client
        if not self.is_open[client]:
            return False
        self._blocks[client] -= -(-sequence.num_tokens // self._block_size)
        is_claimed = bool(self._blocks[client] >= 0 or self._has_none[client])
        self._has_none[client] = False
        self._places[client] -= 1
        self._tokens[client] -= sequence.num_tokens
        if not is_claimed or self._places[client] == 0 or self._tokens[client] <= 0:
            self.close(client)
        return is_claimed

    def close(self, client: int) -> None:
        """Give a client no claim any more."""
        self.num_open -= int(self.is_open[client])
        self.is_open[client] = False
