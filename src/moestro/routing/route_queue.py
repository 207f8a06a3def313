"""Queue of requests in front of the router, sans-IO, held while engines are so loaded that another would only wait.

Its order is that of an order policy, with bounds for each client.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.hashing import name_key
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request, ServiceClass
from moestro.core.views import BE, LS, NEVER_NS, Admitted, EngineTable, Left, OrderPolicy, WaitingView
from moestro.errors import QueueBoundError
from moestro.routing.scoring import LearnedTtft

Group = Hashable  # requests of one group may go to the same engines
HasRoom = Callable[[Group], bool]

NO_QUEUE = "none"  # in place of an order policy: no request waits in front of the router
_FIRST_ROWS = 16
_GAIN = 1 / 16  # weight of the newest wait in the usual one
_MOST_RETRY_AFTER_S = 60
_INT32 = np.iinfo(np.int32)
_COLUMNS = np.dtype(
    [
        ("arrival_ns", np.int64),
        ("serial", np.int64),
        ("user", np.int64),
        ("num_prompt_tokens", np.int32),
        ("num_uncached", np.int32),
        ("priority", np.int32),
        ("service_class", np.uint8),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Bounds of a queue.

    Attributes:
        ttl_ns: longest wait of a request, ns.
        max_requests: waiting requests of one client. None means no limit.
        max_tokens: prompt tokens of one client's waiting requests. None means no limit.
    """

    ttl_ns: int = 60 * NS_PER_S
    max_requests: int | None = None
    max_tokens: int | None = None


class QueuedRequest(msgspec.Struct, eq=False, gc=False):
    """One request in the queue, or one that left it.

    Attributes:
        group: requests of one group may go to the same engines.
        entered_ns: time at which it entered the queue last.
        serial: place in the order of arrivals, which it keeps when it returns.
        num_uncached: prompt tokens that no engine was expected to have cached at its arrival.
        num_returns: times that it was taken from an engine and waits again.
    """

    request: Request
    group: Group
    client: Hashable
    entered_ns: int
    serial: int
    num_uncached: int
    num_returns: int = 0

    @property
    def is_best_effort(self) -> bool:
        """Whether the request is of the class `be`."""
        return self.request.service_class is ServiceClass.BE


class RouteQueue:
    """Requests that wait until an engine has room.

    The next request is the first in the policy's order whose group has room. So the policy's bound on being passed over
    holds among the requests of a group, and no group waits for another one's engines.

    Args:
        policy: orders the requests; its state changes only through `observe` here.
        rules: bounds.

    Invariants: each request that entered leaves by exactly one of `next`, `leave` and `expire`, or enters again by
    `give_back`. `num_tokens` and the counts of clients are those of the waiting requests.
    """

    def __init__(self, policy: OrderPolicy, rules: QueueRules) -> None:
        self.policy = policy
        self._rules = rules
        self._waiting: OrderedDict[str, tuple[QueuedRequest, int]] = OrderedDict()  # by id, in order of entering
        self._num_of_client: Counter[Hashable] = Counter()
        self._tokens_of_client: Counter[Hashable] = Counter()
        self.num_tokens = 0
        self._rows = np.empty(_FIRST_ROWS, _COLUMNS)
        self._of_row: list[QueuedRequest | None] = []
        self._serial = 0
        self._order: deque[int] | None = None  # rows in the policy's order; None means that it is not known
        self._until_ns = 0  # time at which the order may change by itself
        self._usual_wait_ns = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def enter(
        self, request: Request, now_ns: int, *, group: Group, client: Hashable, num_uncached: int | None = None
    ) -> QueuedRequest:
        """Add a request.

        Args:
            group: name of the engines that it may go to.
            client: client whose bounds apply.
            num_uncached: prompt tokens that no engine is expected to have cached. None means all.

        Raises:
            QueueBoundError: the client has as many waiting requests, or tokens of them, as it may have.
        """
        self._check_bounds(client, request.num_prompt_tokens)
        uncached = request.num_prompt_tokens if num_uncached is None else num_uncached
        queued = QueuedRequest(request, group, client, now_ns, self._serial, uncached)
        self._serial += 1
        self._add(queued)
        return queued

    def give_back(self, queued: QueuedRequest, now_ns: int) -> None:
        """Let a request that `next` returned wait again, in its old place by arrival. No bound refuses it."""
        queued.entered_ns = now_ns
        queued.num_returns += 1
        self._add(queued)

    def leave(self, request_id: str) -> None:
        """Remove a request whose client is gone. A request that does not wait is ignored."""
        if request_id in self._waiting:
            self._remove(request_id)

    def next(self, has_room: HasRoom, now_ns: int) -> QueuedRequest | None:
        """Remove and return the first request whose group has room; None if there is none.

        Args:
            has_room: called once for each group in the queue, until one has room.
        """
        found = self._first(has_room, now_ns)
        if found is None:
            return None
        self._remove(found.request.request_id)
        self._learn_wait(now_ns - found.entered_ns)
        if self.policy.observes and not found.num_returns:  # a request is charged once
            self.policy.observe(Admitted(_user_of(found.request), found.request.num_prompt_tokens))
            self._order = None
        return found

    def head(self, now_ns: int) -> QueuedRequest | None:
        """Return the first request of the order, which stays; None if the queue is empty."""
        return self._first(lambda _: True, now_ns)

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Remove and return the requests that have waited for the longest time allowed."""
        since_ns = now_ns - self._rules.ttl_ns
        late: list[QueuedRequest] = []
        for queued, _ in self._waiting.values():
            if queued.entered_ns > since_ns:
                break
            late.append(queued)
        for queued in late:
            self._remove(queued.request.request_id)
            self._learn_wait(now_ns - queued.entered_ns)
        return late

    def ended(self, request: Request, num_generated_tokens: int) -> None:
        """Record the end of a request that had left the queue for an engine."""
        if self.policy.observes:
            self.policy.observe(Left(_user_of(request), num_generated_tokens))
            self._order = None

    def retry_after_s(self) -> int:
        """Whole seconds after which a refused client may try again: the usual wait, of those that expired too."""
        return min(_MOST_RETRY_AFTER_S, max(1, math.ceil(self._usual_wait_ns / NS_PER_S)))

    # --- inside

    def _learn_wait(self, wait_ns: int) -> None:
        self._usual_wait_ns += _GAIN * (wait_ns - self._usual_wait_ns)

    def _check_bounds(self, client: Hashable, num_tokens: int) -> None:
        rules, num, tokens = self._rules, self._num_of_client[client], self._tokens_of_client[client]
        if rules.max_requests is not None and num >= rules.max_requests:
            raise QueueBoundError(f"{num} requests of this client wait, of {rules.max_requests} allowed")
        # A client whose only request is too large for the bound would never be served.
        if rules.max_tokens is not None and num and tokens + num_tokens > rules.max_tokens:
            text = f"prompts of {tokens} tokens of this client wait, of {rules.max_tokens} allowed"
            raise QueueBoundError(f"{text}, and this one has {num_tokens}")

    def _add(self, queued: QueuedRequest) -> None:
        request = queued.request
        if len(self._of_row) == len(self._rows):
            self._compact()
        row = len(self._of_row)
        self._rows[row] = _row(queued)
        self._of_row.append(queued)
        self._waiting[request.request_id] = (queued, row)
        self._num_of_client[queued.client] += 1
        self._tokens_of_client[queued.client] += request.num_prompt_tokens
        self.num_tokens += request.num_prompt_tokens
        self._order = None

    def _remove(self, request_id: str) -> None:
        queued, row = self._waiting.pop(request_id)
        self._of_row[row] = None
        num_tokens = queued.request.num_prompt_tokens
        self.num_tokens -= num_tokens
        self._num_of_client[queued.client] -= 1
        self._tokens_of_client[queued.client] -= num_tokens
        if not self._num_of_client[queued.client]:
            del self._num_of_client[queued.client], self._tokens_of_client[queued.client]

    def _first(self, has_room: HasRoom, now_ns: int) -> QueuedRequest | None:
        room: dict[Group, bool] = {}
        order = self._ordered(now_ns)
        while order and self._of_row[order[0]] is None:
            order.popleft()
        for row in order:
            queued = self._of_row[row]
            if queued is None:
                continue
            if queued.group not in room:
                room[queued.group] = has_room(queued.group)
            if room[queued.group]:
                return queued
        return None

    def _ordered(self, now_ns: int) -> deque[int]:
        """Return rows in the policy's order, which removals leave as it is."""
        if self._order is None or now_ns >= self._until_ns:
            live = np.array([row for _, row in self._waiting.values()], np.int64)
            view = _view(self._rows[live], reads_cache=self.policy.reads_cache)
            self._order = deque(live[self.policy.order(view, now_ns)].tolist() if len(live) else ())
            self._until_ns = self.policy.next_change_ns(view, now_ns)
        return self._order

    def _compact(self) -> None:
        """Drop the rows of requests that have left, and double the space if more than half of the rows are left."""
        kept = [queued for queued in self._of_row if queued is not None]
        rows = np.empty(len(self._rows) * (2 if 2 * len(kept) > len(self._rows) else 1), _COLUMNS)
        for row, queued in enumerate(kept):
            rows[row] = _row(queued)
            self._waiting[queued.request.request_id] = (queued, row)
        self._rows, self._of_row, self._order = rows, list(kept), None


def _row(queued: QueuedRequest) -> tuple[int, ...]:
    request = queued.request
    return (
        request.arrival_ns,
        queued.serial,
        _user_of(request),
        min(request.num_prompt_tokens, _INT32.max),
        min(queued.num_uncached, _INT32.max),
        max(_INT32.min, min(request.priority, _INT32.max)),
        BE if queued.is_best_effort else LS,
    )


def _view(rows: NDArray[np.void], *, reads_cache: bool) -> WaitingView:
    return WaitingView(
        arrival_ns=rows["arrival_ns"],
        num_prompt_tokens=rows["num_prompt_tokens"],
        priority=rows["priority"],
        serial=rows["serial"],
        service_class=rows["service_class"],
        user=rows["user"],
        num_uncached=rows["num_uncached"] if reads_cache else None,
    )


def _user_of(request: Request) -> int:
    return name_key(request.fair_user)


Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationRules:
    """When an engine counts as saturated. One of the conditions suffices.

    Attributes:
        kv_usage: fraction of KV blocks held, 0 .. 1, from which it is.
        num_waiting: requests that may wait in an engine, so that it has work between two reports.
        ttft_ns: predicted time to first token of an empty prompt, ns, above which it is. None means no such condition.
    """

    kv_usage: float = 0.95
    num_waiting: int = 2
    ttft_ns: int | None = None


class EngineSaturation:
    """Judges engines by their last figures, and by the router's own counts since then.

    An engine where requests wait is full: what it runs is its capacity. So an engine may have its capacity and
    `num_waiting` requests more, which is exact between two reports too, because the router counts both ends of each
    request. An engine whose capacity is not known may have `num_waiting` more than it runs. Requests that have their
    first token do not wait. An engine without fresh figures is not judged.
    """

    def __init__(self, rules: SaturationRules, fresh_ns: int) -> None:
        self._rules = rules
        self._fresh_ns = fresh_ns
        self._capacity: dict[int, int] = {}  # requests that an engine runs when it is full, as far as seen
        self._learned = LearnedTtft()
        self._sent: dict[str, tuple[float, float, int]] = {}  # request -> tokens ahead and its own, batch, time

    def reported(self, engine: int, figures: LoadFigures) -> None:
        """Take in the figures that an engine reported."""
        running, waiting = figures.num_running, figures.num_waiting
        if running is not None and waiting is not None:
            known = self._capacity.get(engine, 0)
            self._capacity[engine] = running if waiting else max(known, running)

    def full(self, table: EngineTable, now_ns: int) -> Bools:
        """Return bool[n], whether each engine is saturated.

        Args:
            table: the engines, with the requests that were sent by now.
        """
        rules, fresh_ns = self._rules, self._fresh_ns
        for row in [row for row in self._capacity if row >= len(table) or table.num_running.as_of_ns[row] == NEVER_NS]:
            del self._capacity[row]  # of a process that is gone
        capacity = np.fromiter((self._capacity.get(row, 0) for row in range(len(table))), np.int64, len(table))
        capacity = np.maximum(capacity, table.num_running.values)
        is_full = table.num_in_flight + table.num_foreign >= capacity + rules.num_waiting
        # Requests of others may wait too, but then the engine's own queue has them.
        is_full &= np.maximum(table.num_prefilling, table.num_waiting.values) >= rules.num_waiting
        is_full &= table.num_running.known(now_ns, fresh_ns) & table.num_waiting.known(now_ns, fresh_ns)
        is_full |= (table.kv_usage.values >= rules.kv_usage) & table.kv_usage.known(now_ns, fresh_ns)
        if rules.ttft_ns is not None:
            queued = np.minimum(table.prefill_tokens, table.reported_prefill_tokens)
            is_full |= self._learned(queued, queued, table.num_in_flight) > rules.ttft_ns
        return is_full

    def sent(self, request: Request, engine: int, table: EngineTable, now_ns: int) -> None:
        """Record that the router sent a request, which `table` has, to learn from its first token."""
        if self._rules.ttft_ns is None:
            return
        tokens = float(min(table.prefill_tokens[engine], table.reported_prefill_tokens[engine]))
        self._sent[request.request_id] = (tokens, float(table.num_in_flight[engine]), now_ns)

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Record a computed prompt."""
        if (sent := self._sent.pop(request_id, None)) is not None:
            self._learned.learn(sent[0], sent[1], now_ns - sent[2])

    def ended(self, request_id: str) -> None:
        """Record the end of a request."""
        self._sent.pop(request_id, None)
