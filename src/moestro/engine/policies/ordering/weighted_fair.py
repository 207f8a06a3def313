"""Fair shares of an engine's tokens between users."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import name_key
from moestro.core.order_contract import Admitted, OrderEvent, OrderPolicy
from moestro.core.views import WaitingView
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError

_WEIGHT = "weight:"


@ORDER_POLICIES.register(
    "weighted_fair",
    "Fair shares between users; `weight:NAME` is the weight of one user, 1 where unset.",
    source="Goyal et al., SIGCOMM 1996; VTC, OSDI 2024, for the cost",
)
class WeightedFair(OrderPolicy):
    """Start-time fair queueing in virtual tokens: the user with the least service for its weight is next.

    A request costs its prompt tokens when it is admitted, and its output tokens times `output_cost` when it ends. Each
    cost advances the clock of the request's user by cost / weight. The start tag of a waiting request is its user's
    clock plus the cost / weight of the user's earlier requests; the smallest tag is next. The engine's virtual time is
    the tag last admitted. A returning user starts there, so that no user saves up service while away. All requests
    without a user share one.

    Bound: in tokens. Let v be the engine's virtual time when a request begins to wait, and S its start tag when it is
    admitted. Meanwhile another user of weight w is admitted at most w * (S - v) in cost, plus one request. Besides the
    user's own earlier requests, S - v contains at most its last prompt and output, over its weight. There is no bound
    in time, because the wait grows with the number of other users.

    Args:
        output_cost: cost of an output token, where a prompt token costs 1; 2 as in VTC, section 5.
        weights: weight of one user as `weight:NAME`; the default weight is 1.

    Source: Goyal, Vin and Cheng, "Start-Time Fair Queueing", SIGCOMM 1996. The cost of a request is from Sheng et al.,
    "Fairness in Serving Large Language Models" (VTC), OSDI 2024. VTC charges each output token at once; here the order
    changes only when a request arrives, is admitted, or ends.
    """

    observes = True

    def __init__(self, *, output_cost: float = 2.0, **weights: float) -> None:
        if not 0 <= output_cost < float("inf"):
            raise ConfigError(f"output_cost must be 0 or more, got {output_cost:g}")
        self._output_cost = output_cost
        self._weights: dict[int, float] = {}
        for name, weight in weights.items():
            if not name.startswith(_WEIGHT) or not 0 < weight < float("inf"):
                raise ConfigError(f"{name}={weight:g}: weighted_fair accepts output_cost and weight:NAME, above 0")
            self._weights[name_key(name.removeprefix(_WEIGHT))] = weight
        self._virtual_time = 0.0
        self._clocks: dict[int, float] = {}  # clocks ahead of the virtual time; all other users are at that time
        self._num_kept = 0

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by start tag, then arrival."""
        by_arrival, tags = self._tags(view)
        return by_arrival[np.argsort(tags, kind="stable")]

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        by_arrival, tags = self._tags(view)
        start_tag = np.empty(len(tags))
        start_tag[by_arrival] = tags
        return {"start tag": start_tag}

    def _tags(self, view: WaitingView) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the rows by arrival, and the start tag of each of them."""
        by_arrival = np.lexsort((view.serial, view.arrival_ns))
        users, user_of = np.unique(view.user[by_arrival], return_inverse=True)
        clocks = np.array([self._clock(user) for user in users.tolist()])
        weights = np.array([self.weight(user) for user in users.tolist()])
        by_user = np.argsort(user_of, kind="stable")
        cost = (view.num_prompt_tokens[by_arrival] / weights[user_of])[by_user]
        before = np.cumsum(cost) - cost
        first = np.searchsorted(user_of[by_user], np.arange(len(users)))
        tags = np.empty(len(by_arrival))
        tags[by_user] = before + (clocks - before[first])[user_of[by_user]]
        return by_arrival, tags

    def observe(self, event: OrderEvent) -> None:
        """Charge an admitted prompt or a generated output to its user's clock."""
        start = self._clock(event.user)
        if isinstance(event, Admitted):
            self._virtual_time = start
            cost = float(event.num_prompt_tokens)
        else:
            cost = self._output_cost * event.num_generated_tokens
        self._clocks[event.user] = start + cost / self.weight(event.user)
        if len(self._clocks) > 2 * self._num_kept + 64:
            self._clocks = {user: clock for user, clock in self._clocks.items() if clock > self._virtual_time}
            self._num_kept = len(self._clocks)

    def _clock(self, user: int) -> float:
        return max(self._clocks.get(user, 0.0), self._virtual_time)

    def weight(self, user: int) -> float:
        """Implement `OrderPolicy.weight`."""
        return self._weights.get(user, 1.0)
