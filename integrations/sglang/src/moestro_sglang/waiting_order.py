"""Sorts SGLang's waiting requests by an order policy, the same on all ranks of a tensor-parallel group.

Each rank has its own copy of the waiting list, and sorts it by itself; lists that differ end in a deadlock. So nothing
here reads a clock. A request carries its time of arrival from the API server, and the time of the order is the latest
arrival that the scheduler has seen. An age thus ends a request's waiting as soon as a request arrives that is younger
by that age, which is what the bound on being passed over says.

Nothing here needs SGLang: a request is any object with the attributes of `SglangRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Protocol

import numpy as np

from moestro.core.views import Admitted, Left
from moestro.engine.hosted_order import HostOrder, user_of
from moestro.engine.waiting import WAITING_COLUMNS

ARRIVAL = "moestro_arrival_ns"  # attribute of `time_stats`, set in the API server; 0 means that it was not set there
_ROW = "moestro_row"  # attribute of a request: its length when its row was made, and the row


class SglangRequest(Protocol):
    """Attributes of a request that the order reads, under SGLang's names.

    Attributes:
        rid: Name of the request.
        origin_input_ids, output_ids: Tokens of the prompt, and of the answer so far.
        priority: As the client sent it, or None.
        sampling_params: Object whose `custom_params` is a dict or None.
        time_stats: Object with ARRIVAL.
        extend_batch_idx: Batches that computed a part of its prompt.
    """

    rid: str
    origin_input_ids: Sized
    output_ids: Sized
    priority: int | None
    sampling_params: Any
    time_stats: Any
    extend_batch_idx: int

    def finished(self) -> bool:
        """Return whether the request is over."""
        ...


class WaitingOrder:
    """Sorts a list of waiting requests in place.

    Args:
        order: Orders the rows.
        num_cached: Returns how many of a request's first tokens the prefix cache holds, for a policy that reads it.

    Attributes:
        is_failing: Whether the last sort failed, as the caller notes.
    """

    def __init__(self, order: HostOrder, num_cached: Callable[[Any], int] | None = None) -> None:
        self.is_failing = False
        self._order = order
        self._num_cached = num_cached
        self._now_ns = 0  # the latest arrival
        self._serial = 0
        self._waiting: dict[str, SglangRequest] = {}  # as of the last sort; empty where the policy observes nothing
        self._admitted: dict[str, SglangRequest] = {}

    def sort(self, requests: list[Any]) -> None:
        """Sort `requests`, the next to be admitted first."""
        if self._order.policy.observes:
            self._observe(requests)
        rows = [self._row(request) for request in requests]
        if len(rows) < 2:
            return
        look_up = self._num_cached
        view = self._order.view(
            np.array(rows, WAITING_COLUMNS), None if look_up is None else lambda i: look_up(requests[i])
        )
        requests[:] = [requests[i] for i in self._order.order(view, self._now_ns).tolist()]

    def _row(self, request: SglangRequest) -> Any:
        num_output = len(request.output_ids)
        known = getattr(request, _ROW, None)
        if known is not None and known[0] == num_output:
            return known[1]
        if known is None:
            self._serial += 1
            arrival_ns = getattr(request.time_stats, ARRIVAL, 0) or self._now_ns
            self._now_ns = max(self._now_ns, arrival_ns)
            serial = self._serial
        else:
            arrival_ns, serial = known[1][:2]  # it was preempted, and keeps its arrival
        num_prompt = len(request.origin_input_ids)
        num_tokens = num_prompt, num_prompt + num_output
        row = self._order.row(serial, arrival_ns, num_tokens, request.priority or 0, _fields(request))
        setattr(request, _ROW, (num_output, row))
        return row

    def _observe(self, requests: list[Any]) -> None:
        """Report to the policy which requests were admitted, and which ended, since the last sort."""
        policy, now = self._order.policy, {request.rid: request for request in requests}
        for rid, request in self._waiting.items():
            # One that left the list without a batch was aborted, and costs its user nothing.
            if rid not in now and rid not in self._admitted and request.extend_batch_idx:
                policy.observe(Admitted(user_of(_fields(request)), len(request.origin_input_ids)))
                self._admitted[rid] = request
        for rid, request in list(self._admitted.items()):
            if request.finished():
                policy.observe(Left(user_of(_fields(request)), len(request.output_ids)))
                del self._admitted[rid]
        self._waiting = now


def _fields(request: SglangRequest) -> Mapping[str, Any]:
    found = getattr(request.sampling_params, "custom_params", None)
    return found if isinstance(found, Mapping) else {}  # clients may send anything
