"""Fair shares of an engine's tokens between users."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.hashing import name_key
from moestro.core.views import WaitingView
from moestro.engine.policy_contract import Admitted, OrderEvent, OrderPolicy
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError

_WEIGHT = "weight:"


@ORDER_POLICIES.register(
    "weighted_fair",
    "Fair shares between users; `weight:NAME` is the weight of one user, 1 where unset.",
    source="Goyal et al., SIGCOMM 1996; VTC, OSDI 2024, for the cost",
)
class WeightedFair(OrderPolicy):
    """The user who got the least for its weight is next: start-time fair queueing, in virtual tokens.

    A request costs its prompt when it is admitted, and what it generated, times `output_cost`, when it is over. Its
    user's clock goes forward by cost / weight. A request's start tag is its user's clock and the cost / weight of the
    user's requests before it; the smallest tag is next. The engine's virtual time is the tag last admitted: a user who
    comes back starts there, so that nobody saves up while away. Requests without a user are one user's.

    Bound: in tokens. Let the engine's virtual time be v when a request begins to wait, and S its start tag when it is
    admitted. In between any other user of weight w is admitted w * (S - v) in cost and one request more; of S - v, that
    which is not the user's own earlier requests is at most its last prompt and what it has generated, over its weight.
    In time there is none: it grows with the number of other users.

    Args:
        output_cost: of a generated token; a prompt's costs 1. 2 as in VTC, section 5.
        weights: `weight:NAME` is that user's weight; everybody else's is 1.

    Source: Goyal, Vin and Cheng, "Start-Time Fair Queueing", SIGCOMM 1996. What a request costs: Sheng et al.,
    "Fairness in Serving Large Language Models" (VTC), OSDI 2024, which charges each generated token at once; here the
    order changes only when a request comes, enters or leaves.
    """

    observes = True

    def __init__(self, *, output_cost: float = 2.0, **weights: float) -> None:
        if not 0 <= output_cost < float("inf"):
            raise ConfigError(f"output_cost must be 0 or more, got {output_cost:g}")
        self._output_cost = output_cost
        self._weights: dict[int, float] = {}
        for name, weight in weights.items():
            if not name.startswith(_WEIGHT) or not 0 < weight < float("inf"):
                raise ConfigError(f"{name}={weight:g}: weighted_fair knows output_cost and weight:NAME, above 0")
            self._weights[name_key(name.removeprefix(_WEIGHT))] = weight
        self._virtual_time = 0.0
        self._clocks: dict[int, float] = {}  # only those ahead of the virtual time; the others stand at it
        self._num_kept = 0

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """By start tag, then arrival."""
        by_arrival = np.lexsort((view.serial, view.arrival_ns))
        users, user_of = np.unique(view.user[by_arrival], return_inverse=True)
        clocks = np.array([self._clock(user) for user in users.tolist()])
        weights = np.array([self._weight(user) for user in users.tolist()])
        by_user = np.argsort(user_of, kind="stable")
        cost = (view.num_prompt_tokens[by_arrival] / weights[user_of])[by_user]
        before = np.cumsum(cost) - cost
        first = np.searchsorted(user_of[by_user], np.arange(len(users)))
        tags = np.empty(len(by_arrival))
        tags[by_user] = before + (clocks - before[first])[user_of[by_user]]
        return by_arrival[np.argsort(tags, kind="stable")]

    def observe(self, event: OrderEvent) -> None:
        """Charge what was admitted, or what was generated, to its user's clock."""
        start = self._clock(event.user)
        if isinstance(event, Admitted):
            self._virtual_time = start
            cost = float(event.num_prompt_tokens)
        else:
            cost = self._output_cost * event.num_generated_tokens
        self._clocks[event.user] = start + cost / self._weight(event.user)
        if len(self._clocks) > 2 * self._num_kept + 64:
            self._clocks = {user: clock for user, clock in self._clocks.items() if clock > self._virtual_time}
            self._num_kept = len(self._clocks)

    def _clock(self, user: int) -> float:
        return max(self._clocks.get(user, 0.0), self._virtual_time)

    def _weight(self, user: int) -> float:
        return self._weights.get(user, 1.0)
