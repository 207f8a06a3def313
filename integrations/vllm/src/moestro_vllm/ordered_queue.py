"""A waiting queue in the order of one of Moestro's order policies, with the methods of vLLM's `RequestQueue`.

Nothing here needs vLLM: a request is any object with the attributes of `QueuedRequest`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from moestro.core.clock import FOREVER_NS, NS_PER_S
from moestro.core.views import Admitted, Left
from moestro.engine.hosted_order import HostOrder, user_of
from moestro.engine.waiting import WAITING_COLUMNS

_logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers print the loggers below "vllm"


class QueuedRequest(Protocol):
    """Attributes of a request that the queue reads, under vLLM's names.

    Attributes:
        arrival_time: Time of arrival at the API server, seconds since 1970.
        num_prompt_tokens: Length of the prompt.
        num_tokens: Length of the prompt and of the tokens generated so far.
        priority: As the client sent it.
        sampling_params: Object whose `extra_args` is a dict or None; None for a pooling request.
    """

    arrival_time: float
    priority: int
    sampling_params: Any

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and of the tokens generated so far."""


class OrderedQueue:
    """Waiting requests in an order policy's order.

    The policy sorts again only when the order may have changed: after a request came or was withdrawn, after an
    event, and at the time that the policy names. `pop_request` takes what `peek_request` last showed, because vLLM
    allocates blocks for that request in between.

    Args:
        order: Orders the rows; the state of its policy changes only through `admitted` and `left`.
        now_ns: Clock of the requests' `arrival_time`, in nanoseconds.
        num_cached: Returns how many of a request's first tokens the prefix cache holds, for a policy that reads it.
    """

    def __init__(
        self, order: HostOrder, now_ns: Callable[[], int], num_cached: Callable[[Any], int] | None = None
    ) -> None:
        self.policy = order.policy
        if self.policy.reads_cache and num_cached is None:
            raise ValueError("a policy that reads the prefix cache needs num_cached")
        self._ordering = order
        self._now_ns = now_ns
        self._num_cached = num_cached
        self._rows = np.empty(16, WAITING_COLUMNS)
        self._requests: list[Any] = []  # by row; None where the request is gone
        self._row_of: dict[Any, int] = {}
        self._first_serial = self._last_serial = 0
        self._order: list[int] = []  # rows, of which the first `_num_passed` were taken
        self._num_passed = 0
        # The order holds in [_from_ns, _until_ns) until something but time changes it.
        self._from_ns = self._until_ns = 0
        self._shown: Any = None
        self._is_failing = False  # whether the last look raised, which is logged once

    # --- vLLM's RequestQueue ------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """Append `request`, which is not in the queue."""
        self._last_serial += 1
        self._add(request, self._last_serial)

    def pop_request(self) -> Any:
        """Remove and return the request that `peek_request` last showed, or else the first one.

        Raises:
            IndexError: The queue is empty.
        """
        request = self._shown if self._shown is not None else self.peek_request()
        self._drop(request)
        self._shown = None
        return request

    def peek_request(self) -> Any:
        """Return the first request.

        Raises:
            IndexError: The queue is empty.
        """
        if not self._row_of:
            raise IndexError("the queue is empty")
        self._sort()
        while self._requests[self._order[self._num_passed]] is None:
            self._num_passed += 1
        self._shown = self._requests[self._order[self._num_passed]]
        return self._shown

    def prepend_request(self, request: Any) -> None:
        """Put back a request that was popped or preempted. It keeps its arrival time, which decides its place."""
        self._first_serial -= 1
        self._add(request, self._first_serial)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put back several requests; of two that the policy finds equal, the later one comes first."""
        for request in list(requests):
            self.prepend_request(request)

    def remove_request(self, request: Any) -> None:
        """Withdraw `request`.

        Raises:
            ValueError: It is not in the queue.
        """
        if request not in self._row_of:
            raise ValueError(f"request {getattr(request, 'request_id', request)} is not in the queue")
        self._drop(request)
        self._forget_order()

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Withdraw those of `requests` that are in the queue."""
        for request in [each for each in requests if each in self._row_of]:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all requests in the policy's order."""
        if not self._row_of:
            return
        self._sort()
        for row in self._order[self._num_passed :]:
            request = self._requests[row]
            if request is not None:
                yield request

    # --- what a scheduler reports -------------------------------------------------------------------------------------

    def cache_changed(self) -> None:
        """Report that the prefix cache may hold other blocks than before."""
        if self.policy.reads_cache:
            self._forget_order()

    def admitted(self, request: QueuedRequest) -> None:
        """Report that `request` was given KV blocks for the first time."""
        if self.policy.observes:
            self.policy.observe(Admitted(user_of(_extra_args(request)), request.num_prompt_tokens))
            self._forget_order()

    def left(self, request: QueuedRequest) -> None:
        """Report that `request` is over."""
        if self.policy.observes:
            self.policy.observe(Left(user_of(_extra_args(request)), request.num_tokens - request.num_prompt_tokens))
            self._forget_order()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _add(self, request: Any, serial: int) -> None:
        if request in self._row_of:
            raise ValueError(f"request {getattr(request, 'request_id', request)} is in the queue already")
        if len(self._requests) == len(self._rows):
            self._compact()
        row = len(self._requests)
        self._rows[row] = self._row(request, serial)
        self._requests.append(request)
        self._row_of[request] = row
        self._forget_order()

    def _row(self, request: QueuedRequest, serial: int) -> Any:
        num_tokens = request.num_prompt_tokens, request.num_tokens
        arrival_ns = round(request.arrival_time * NS_PER_S)
        return self._ordering.row(serial, arrival_ns, num_tokens, request.priority, _extra_args(request))

    def _drop(self, request: Any) -> None:
        self._requests[self._row_of.pop(request)] = None

    def _forget_order(self) -> None:
        self._until_ns = self._from_ns
        self._shown = None

    def _sort(self) -> None:
        now_ns = self._now_ns()
        if self._from_ns <= now_ns < self._until_ns:
            return
        rows = np.fromiter(self._row_of.values(), np.int64, len(self._row_of))
        self._num_passed = 0
        if len(rows) == 1:
            self._order, self._from_ns, self._until_ns = rows.tolist(), now_ns, FOREVER_NS
            return
        taken, look_up = self._rows.take(rows), self._num_cached
        try:
            view = self._ordering.view(taken, None if look_up is None else lambda i: look_up(self._requests[rows[i]]))
            order, self._until_ns = self._ordering.order(view, now_ns), self.policy.next_change_ns(view, now_ns)
            self._is_failing = False
        except Exception:  # it would end the engine
            if not self._is_failing:
                _logger.exception("Moestro cannot order the waiting requests; they are served by arrival until it can")
            order, self._until_ns = np.argsort(taken["arrival_ns"], kind="stable"), now_ns
            self._is_failing = True
        self._order, self._from_ns = rows[order].tolist(), now_ns

    def _compact(self) -> None:
        """Drop the rows of requests that are gone, and double the space when more than half of the rows are alive."""
        rows = np.array(sorted(self._row_of.values()), np.int64)
        kept = np.empty(len(self._rows) * (2 if 2 * len(rows) > len(self._rows) else 1), WAITING_COLUMNS)
        kept[: len(rows)] = self._rows[rows]
        self._rows = kept
        self._requests = [self._requests[row] for row in rows.tolist()]
        self._row_of = {request: row for row, request in enumerate(self._requests)}


def _extra_args(request: QueuedRequest) -> dict[str, Any]:
    return getattr(request.sampling_params, "extra_args", None) or {}
