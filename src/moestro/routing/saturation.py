"""Saturation: which engines are so loaded that another request would only wait there. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request
from moestro.core.views import NEVER_NS, EngineTable
from moestro.routing.ttft import LearnedTtft

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
    num_waiting: int = 4
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
