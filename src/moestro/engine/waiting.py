"""Waiting queue of one rank: columns for the order policy, objects for the scheduler, and the shares of clients.

Shares say which waiting sequences may claim a place, and whose sequences give way for them. They have no effect while
one client has all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.hashing import name_key
from moestro.core.request import Request
from moestro.core.views import BE, LS, BatchLimits, OrderEvent, OrderPolicy, ShareView, WaitingView
from moestro.core.work import Int32s, Slots
from moestro.engine.block_pool import BlockPool
from moestro.engine.registry import SharePolicy
from moestro.engine.sequences import Sequence, SequenceTable
from moestro.errors import PromptTooLongError


def check_length(request: Request, max_model_len: int) -> None:
    """Check that a request can fit.

    Args:
        request: new request.
        max_model_len: maximum tokens of a request, prompt and output.

    Raises:
        PromptTooLongError: the request can never fit, however long it waits.
    """
    if request.num_total_tokens > max_model_len:
        raise PromptTooLongError(request.num_prompt_tokens, request.sampling.max_tokens, max_model_len)


def client_giving_way(num_waiting: NDArray[np.int64], may_leave: NDArray[np.bool_], client: int | None) -> int | None:
    """Return the client that gives up a place of a full queue for a request of `client`. None means none.

    It is the one with most places, if it still has as many as `client` afterwards. So each client has a place before
    any has another one, and none with fewer than an equal share is refused while another has more.

    Args:
        num_waiting: int64[clients], places of each client, by number.
        may_leave: bool[clients], whether a client has a request that may leave.
        client: number of the new request's client. None means that it has no request yet.
    """
    num_own = 0 if client is None or client >= len(num_waiting) else num_waiting.item(client)
    givers = np.where(may_leave, num_waiting, 0)
    if not len(givers) or givers.max() <= num_own + 1:
        return None
    return int(givers.argmax())


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
        if len(self._number_of) <= 1 and not self.are_needed and len(self.part) == len(self._clients):
            return  # the only client has come or gone, and all parts are 1
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


MAX_LOOKED_UP = 64  # the oldest rows, which are looked up in the prefix cache; log2(blocks) look-ups each

# A waiting request as order policies see it, its client, and the serial of its arrival in the queue.
WAITING_COLUMNS = np.dtype(
    [
        ("arrival_ns", np.int64),
        ("serial", np.int64),
        ("user", np.int64),
        ("client", np.int64),
        ("num_prompt_tokens", np.int32),
        ("num_tokens", np.int32),
        ("priority", np.int32),
        ("service_class", np.uint8),
    ],
    align=True,
)


def waiting_view(rows: NDArray[np.void], num_uncached: Int32s | None) -> WaitingView:
    """Return an order policy's view of rows of `WAITING_COLUMNS`.

    Args:
        num_uncached: int32[rows], tokens to compute; None for a policy that does not read the prefix cache.
    """
    return WaitingView(
        arrival_ns=rows["arrival_ns"],
        num_prompt_tokens=rows["num_prompt_tokens"],
        priority=rows["priority"],
        serial=rows["serial"],
        service_class=rows["service_class"],
        user=rows["user"],
        num_uncached=num_uncached,
    )


class QueueOrder(NamedTuple):
    """A waiting queue as its order policy saw it last.

    Attributes:
        view: all waiting requests.
        order: int64[n], rows of `view`, the first to be admitted first.
        sorted_ns: time for which the policy sorted.
    """

    view: WaitingView
    order: NDArray[np.int64]
    sorted_ns: int


class WaitingQueue:
    """Sequences without KV blocks, in the order policy's order.

    The policy sorts again only when the order may have changed. Rows are appended and marked dead, and compacted
    when half of them are dead, so that a long queue costs no Python per row.

    Args:
        policy: orders the rows; its state changes only through `observe` here.
        pool: prefix cache, for a policy that reads it.
        block_size: tokens of one block.

    Attributes:
        num_tokens: known tokens of all waiting sequences.
        num_kept: those of them whose KV is in host memory.
        num_ls: latency-sensitive waiting sequences.
    """

    def __init__(self, policy: OrderPolicy, pool: BlockPool, block_size: int) -> None:
        self.policy = policy
        self._pool = pool
        self._block_size = block_size
        # Rows are written when the policy sorts several requests; a queue of one needs none.
        self._rows = np.empty(16, WAITING_COLUMNS)
        self._live = np.zeros(16, np.bool_)
        self._num_written = 0
        self._sequences: list[Sequence | None] = []
        self._row_of: dict[int, int] = {}
        self.num_tokens = self.num_kept = 0
        self.num_ls = 0
        self._order: NDArray[np.int64] | list[int] = []
        # The order holds in [_from_ns, _until_ns), as long as the prefix cache stays the same.
        self._from_ns = self._until_ns = 0
        self._pool_version = 0
        self._last: tuple[WaitingView, NDArray[np.int64]] | None = None  # of the last sort; None for a single row

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, sequence: Sequence) -> None:
        """Append `sequence`, which is not in the queue."""
        assert sequence.serial not in self._row_of, f"{sequence.request.request_id} is waiting already"
        if len(self._sequences) == len(self._rows):
            self._compact()
        self._row_of[sequence.serial] = len(self._sequences)
        self._sequences.append(sequence)
        self.num_tokens += sequence.num_tokens
        self.num_kept += sequence.num_kept
        self.num_ls += sequence.service_class == LS
        self._until_ns = self._from_ns

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence`, which is in the queue, out of it."""
        row = self._row_of.pop(sequence.serial)
        self._sequences[row] = None
        if row < self._num_written:
            self._live[row] = False
        if not self._row_of:
            self._sequences.clear()  # all rows are dead, and the next one is the first
            self._num_written = 0
        self.num_tokens -= sequence.num_tokens
        self.num_kept -= sequence.num_kept
        self.num_ls -= sequence.service_class == LS
        self._until_ns = self._from_ns

    def giving_way_to(self, client: int | None) -> Sequence | None:
        """Return the sequence that leaves a full queue for a request of another client. None means that none does.

        It is the newest one of its client. Sequences that have been admitted before, here or by another engine, stay.

        Args:
            client: number of the new request's client. None means that it has no sequence yet.
        """
        waiting = [self._sequences[row] for row in self._row_of.values()]
        in_queue = [sequence for sequence in waiting if sequence is not None]
        clients = np.array([sequence.client for sequence in in_queue], np.int64)
        is_new = np.array([sequence.is_new for sequence in in_queue], np.bool_)
        num_waiting = np.bincount(clients)
        giver = client_giving_way(num_waiting, np.bincount(clients[is_new], minlength=len(num_waiting)) > 0, client)
        if giver is None:
            return None
        new = [sequence for sequence in in_queue if sequence.is_new and sequence.client == giver]
        return max(new, key=lambda sequence: sequence.serial)

    def observe(self, event: OrderEvent) -> None:
        """Pass an event to the policy; the order may change."""
        self.policy.observe(event)
        self._until_ns = self._from_ns

    def in_order(self, now_ns: int) -> Iterator[Sequence]:
        """Iterate over the sequences in order of admission; the queue must not change meanwhile."""
        self._sort(now_ns)
        for row in self._order:  # mostly one or two of many
            sequence = self._sequences[row]
            assert sequence is not None, f"row {row} is dead"
            yield sequence

    def claimants(self, claims: Claims, now_ns: int) -> list[Sequence]:
        """Take the sequences that have `claims`, in order of admission.

        A best-effort sequence has none while latency-sensitive ones wait, nor have those of its client behind it.
        """
        self._sort(now_ns)
        rows = self._order
        if len(rows) > 1:
            # Rows are written: a queue of several was sorted by the policy.
            columns = self._rows.take(rows)
            rows = np.asarray(rows)[claims.is_open[columns["client"]]].tolist()
        found: list[Sequence] = []
        for row in rows:
            if not claims.num_open:
                break
            sequence = self._sequences[row]
            assert sequence is not None, f"row {row} is dead"
            if sequence.service_class == BE and self.num_ls:
                claims.close(sequence.client)
            elif claims.take(sequence):
                found.append(sequence)
        return found

    def last_order(self, now_ns: int) -> QueueOrder:
        """Return the present order, and what the policy knew when it sorted."""
        self._sort(now_ns)
        if self._last is not None:
            return QueueOrder(*self._last, self._from_ns)
        self._write_rows()
        rows = self._order
        view = self._view(self._rows.take(rows), lambda i: self._sequences[rows[i]])
        return QueueOrder(view, np.arange(len(rows)), self._from_ns)

    def order_holds_until_ns(self, now_ns: int) -> int:
        """The first time after `now_ns` at which the order may change with time alone."""
        self._sort(now_ns)
        return self._until_ns

    def rank(self, sequences: list[Sequence], now_ns: int) -> NDArray[np.int64]:
        """int64[n], the place of each of `sequences` in the policy's order of them; they need not be in the queue."""
        rows = np.array([_row(sequence) for sequence in sequences], WAITING_COLUMNS)
        order = self.policy.order(self._view(rows, sequences.__getitem__), now_ns)
        ranks = np.empty(len(sequences), np.int64)
        ranks[order] = np.arange(len(sequences))
        return ranks

    def _sort(self, now_ns: int) -> None:
        same_cache = not self.policy.reads_cache or self._pool_version == self._pool.version
        if self._from_ns <= now_ns < self._until_ns and same_cache:
            return
        if len(self._row_of) == 1:
            self._order, self._from_ns, self._until_ns = list(self._row_of.values()), now_ns, FOREVER_NS
            self._last = None
            self._pool_version = self._pool.version
            return
        self._write_rows()
        (rows,) = self._live.nonzero()
        # On structured rows `take` costs a tenth of indexing.
        view = self._view(self._rows.take(rows), lambda i: self._sequences[rows[i]])
        order = self.policy.order(view, now_ns)
        self._order, self._last = rows[order], (view, order)
        self._from_ns, self._until_ns = now_ns, self.policy.next_change_ns(view, now_ns)
        self._pool_version = self._pool.version

    def _view(self, rows: NDArray[np.void], sequence_at: Callable[[int], Sequence | None]) -> WaitingView:
        """The policy's view of `rows`; row i belongs to `sequence_at(i)`."""
        return waiting_view(rows, self._num_uncached(rows, sequence_at) if self.policy.reads_cache else None)

    def _num_uncached(self, rows: NDArray[np.void], sequence_at: Callable[[int], Sequence | None]) -> Int32s:
        num_uncached = rows["num_tokens"].copy()
        for i in np.argsort(rows["arrival_ns"], kind="stable")[:MAX_LOOKED_UP].tolist():
            sequence = sequence_at(i)
            assert sequence is not None, f"row {i} is dead"
            num_tokens = sequence.num_tokens
            num_blocks = self._pool.estimate_prefix(sequence.readable_hashes(), num_tokens // self._block_size)
            num_uncached[i] -= min(max(num_blocks * self._block_size, sequence.num_kept), num_tokens - 1)
        return num_uncached

    def _write_rows(self) -> None:
        """Write the rows of the sequences that came since the last call."""
        for row in range(self._num_written, len(self._sequences)):
            sequence = self._sequences[row]
            if sequence is not None:
                self._rows[row] = _row(sequence)
                self._live[row] = True
        self._num_written = len(self._sequences)

    def _compact(self) -> None:
        """Drop dead rows, and double the space when more than half of the rows are alive."""
        self._write_rows()
        rows = np.flatnonzero(self._live)
        size = len(self._rows) * (2 if 2 * len(rows) > len(self._rows) else 1)
        kept = np.empty(size, WAITING_COLUMNS)
        kept[: len(rows)] = self._rows[rows]
        self._rows = kept
        self._live = np.arange(size) < len(rows)
        self._sequences = [self._sequences[row] for row in rows.tolist()]
        self._num_written = len(rows)
        self._row_of = {int(serial): row for row, serial in enumerate(kept["serial"][: len(rows)].tolist())}


def view_of_one(sequence: Sequence, num_uncached: int | None) -> WaitingView:
    """Return an order policy's view of one sequence; `num_uncached` as in `waiting_view`."""
    column = None if num_uncached is None else np.array([num_uncached], np.int32)
    return waiting_view(np.array([_row(sequence)], WAITING_COLUMNS), column)


def _row(sequence: Sequence) -> tuple[int, ...]:
    request = sequence.request
    return (
        request.arrival_ns,
        sequence.serial,
        sequence.user,
        sequence.client,
        request.num_prompt_tokens,
        sequence.num_tokens,
        request.priority,
        sequence.service_class,
    )
