"""Scheduler classes for vLLM's `--scheduler-cls`: its own asynchronous scheduler with another waiting queue."""

from __future__ import annotations

import logging
import time
from typing import Any, ClassVar

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue

from moestro_vllm.interface import check_scheduler
from moestro_vllm.order_settings import make_order
from moestro_vllm.ordered_queue import OrderedQueue

_logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's handlers print the loggers below "vllm"


class PolicyRequestQueue(OrderedQueue, RequestQueue):
    """`OrderedQueue` as a subclass of vLLM's interface."""


class PolicyScheduler(AsyncScheduler):
    """vLLM's scheduler, whose waiting requests are in the order of one of Moestro's policies.

    Requests that hold KV blocks while they wait are served before all others, in vLLM's order, as vLLM requires.
    With `--scheduling-policy priority` vLLM preempts the least urgent request, so more urgent ones come first here too,
    unless `be_priority` makes classes of priorities.

    Attributes:
        order: Name of the order policy.
    """

    order: ClassVar[str]
    waiting: PolicyRequestQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_scheduler(self)
        order, text = make_order(self.order, self.vllm_config.additional_config, self.scheduler_config.policy)
        # `arrival_time` of a request is on this clock.
        self.waiting = PolicyRequestQueue(order, time.time_ns, self._num_cached)
        _logger.info("Moestro orders waiting requests by %s: %s", text, order.in_words())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule one step as vLLM does, and report to the policy which requests were admitted."""
        self.waiting.cache_changed()
        output = super().schedule(*args, **kwargs)
        if self.waiting.policy.observes:
            for new in output.scheduled_new_reqs:
                self.waiting.admitted(self.requests[new.req_id])
        return output

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.waiting.left(request)
        return super()._free_request(request, *args, **kwargs)

    def _num_cached(self, request: Any) -> int:
        """Tokens of the request's prefix in the local cache; the look-up changes and counts nothing."""
        manager = self.kv_cache_manager
        if not manager.enable_caching or request.skip_reading_prefix_cache:
            return 0
        return int(manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])


class FCFS(PolicyScheduler):
    """First come, first served, through our queue: the reference for the other classes."""

    order = "fcfs"


class SJF(PolicyScheduler):
    """Shortest prompt first, with ageing (Gimbal v1, Algorithm 2)."""

    order = "sjf"


class PrefillAware(PolicyScheduler):
    """Fewest uncached prompt tokens first, with ageing (our reconstruction of Gimbal v2)."""

    order = "prefill_aware"


class EDF(PolicyScheduler):
    """Earliest deadline first; the deadline follows from the request's class."""

    order = "edf"


class WeightedFair(PolicyScheduler):
    """Fair shares of the engine's tokens between users."""

    order = "weighted_fair"


class QLLM(PolicyScheduler):
    """Latency-sensitive requests first (QLLM, section 3.2); `be_priority` makes classes of vLLM's priorities."""

    order = "qllm"
