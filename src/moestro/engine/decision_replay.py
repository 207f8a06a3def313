"""Makes recorded decisions of a scheduler's policies again: the order of its queue, and victims of preemption."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from moestro.core.order_contract import Admitted, Left, OrderPolicy
from moestro.core.scheduling_events import (
    EvictDecision,
    OrderDecision,
    PoliciesStarted,
    SchedulingEvent,
    SequenceAdmitted,
    SequenceLeft,
)
from moestro.core.views import EvictView, Victim, WaitingView
from moestro.engine.policy_contract import EvictPolicy
from moestro.engine.registry import EVICT_POLICIES, ORDER_POLICIES
from moestro.errors import ConfigError

_P = TypeVar("_P")


class ReplayedDecision(NamedTuple):
    """A decision as recorded and as made again, in words."""

    request_id: str
    recorded: str
    replayed: str


class DecisionReplay:
    """The policies of one engine, fed with its events in order."""

    def __init__(self) -> None:
        self._order: OrderPolicy | None = None
        self._evict: EvictPolicy | None = None

    def take(self, event: SchedulingEvent) -> ReplayedDecision | None:
        """Take in an event, and return the decision that it holds; None means none.

        Raises:
            ConfigError: the event comes before `PoliciesStarted`, or names a policy that cannot be made.
        """
        match event:
            case PoliciesStarted():
                self._order, self._evict = ORDER_POLICIES.make(event.order), EVICT_POLICIES.make(event.evict)
            case SequenceAdmitted() if event.is_first:
                self._observe(Admitted(event.user, event.num_prompt_tokens))
            case SequenceLeft():
                self._observe(Left(event.user, event.num_generated_tokens))
            case OrderDecision():
                return self._ordered(event)
            case EvictDecision():
                return self._evicted(event)
        return None

    def _observe(self, event: Admitted | Left) -> None:
        order = self._started(self._order)
        if order.observes:
            order.observe(event)

    def _ordered(self, event: OrderDecision) -> ReplayedDecision:
        view = WaitingView(
            arrival_ns=np.array(event.arrival_ns, np.int64),
            num_prompt_tokens=np.array(event.num_prompt_tokens, np.int32),
            priority=np.array(event.priority, np.int32),
            serial=np.array(event.serial, np.int64),
            service_class=np.array(event.service_class, np.uint8),
            user=np.array(event.user, np.int64),
            num_uncached=None if event.num_uncached is None else np.array(event.num_uncached, np.int32),
        )
        order = self._started(self._order).order(view, event.now_ns)
        again = [event.request_ids[row] for row in order.tolist()]
        return ReplayedDecision(
            event.request_ids[0], f"order {', '.join(event.request_ids)}", f"order {', '.join(again)}"
        )

    def _evicted(self, event: EvictDecision) -> ReplayedDecision:
        view = EvictView(
            np.array(event.order_rank, np.int64),
            np.array(event.num_computed_tokens, np.int32),
            np.array(event.service_class, np.uint8),
            event.num_free_host_tokens,
        )
        again = self._started(self._evict)(view)
        recorded = Victim(event.row, event.keeps)
        return ReplayedDecision(event.request_id, _victim(recorded), _victim(again))

    @staticmethod
    def _started(policy: _P | None) -> _P:
        if policy is None:
            raise ConfigError(
                "the record has decisions of an engine before its policies: give it from its first line on"
            )
        return policy


def _victim(victim: Victim) -> str:
    return f"preempt row {int(victim.row)}" + (", keep its KV in host memory" if victim.keeps else "")
