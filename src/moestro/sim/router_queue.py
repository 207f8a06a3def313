"""The production queue in front of a simulated router, and the judgement of engines by their delayed figures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moestro.core.clock import FOREVER_NS
from moestro.core.load_figures import LoadFigures
from moestro.core.order_contract import OrderPolicy
from moestro.core.request import Request
from moestro.core.script import Script
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.route_queue import EngineSaturation, QueueRules, RouteQueue, SaturationRules
from moestro.routing.router import Router

LOOK_NS = 100_000_000  # `moestro route` reads figures so often while requests wait


class WaitingJob(NamedTuple):
    """A request that waits, and its row in the results."""

    request: Request
    script: Script
    row: int


class SimulatedQueue:
    """Requests that wait in front of a simulated router. None is refused.

    Args:
        router: router whose engines are judged.
        policy: orders the requests.
        rules: when an engine is saturated.
    """

    def __init__(self, router: Router, policy: OrderPolicy, rules: SaturationRules) -> None:
        self._router = router
        self._queue = RouteQueue(policy, QueueRules(ttl_ns=FOREVER_NS))
        self._saturation = EngineSaturation(rules, FRESH_NS)
        self._jobs: dict[str, WaitingJob] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, job: WaitingJob, now_ns: int) -> None:
        """Add a request."""
        request = job.request
        best_hit = self._router.best_hit_tokens(request) if self._queue.policy.reads_cache else 0
        num_uncached = max(1, request.num_prompt_tokens - best_hit)
        self._queue.enter(request, now_ns, group=None, client=None, num_uncached=num_uncached)
        self._jobs[request.request_id] = job

    def next(self, now_ns: int) -> tuple[WaitingJob, list[int]] | None:
        """Remove and return the next request if an engine has room, with the rows of the saturated ones."""
        full = self._saturation.full(self._router.table, now_ns)
        queued = self._queue.next(lambda _: not full.all(), now_ns)
        return None if queued is None else (self._jobs.pop(queued.request.request_id), np.flatnonzero(full).tolist())

    def sent(self, request: Request, engine: int, now_ns: int) -> None:
        """Record that the router sent a request."""
        self._saturation.sent(request, engine, self._router.table, now_ns)

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Record a first token."""
        self._saturation.first_token(request_id, now_ns)

    def ended(self, request: Request, num_generated_tokens: int) -> None:
        """Record the end of a request."""
        self._saturation.ended(request.request_id)
        self._queue.ended(request, num_generated_tokens)

    def reported(self, engine: int, figures: LoadFigures) -> None:
        """Take in an engine's figures."""
        self._saturation.reported(engine, figures)
