"""Order policies: a total order of the waiting requests, and a bound on how long a request can be passed over."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS, NS_PER_S, to_ns
from moestro.core.hashing import name_key
from moestro.core.views import BE, LS, Admitted, OrderEvent, OrderPolicy, WaitingView
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError


@ORDER_POLICIES.register(
    "fcfs",
    "First come, first served.",
    source="vLLM, `--scheduling-policy fcfs`",
)
class Fcfs(OrderPolicy):
    """First come, first served, by arrival at the API server. No later arrival passes a request.

    A preempted sequence keeps its arrival time, so it precedes all later arrivals.
    """

    max_passed_over_ns = 0

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by arrival."""
        return np.lexsort((view.serial, view.arrival_ns))


@ORDER_POLICIES.register(
    "priority",
    "Lowest `priority` first.",
    source="vLLM, `--scheduling-policy priority`",
)
class Priority(OrderPolicy):
    """Lowest `priority` first, then first come, first served (vLLM's `--scheduling-policy priority`).

    Bound: none. A stream of more urgent requests can pass a request for ever.
    """

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by priority, then arrival."""
        return np.lexsort((view.serial, view.arrival_ns, view.priority))

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        return {"priority": view.priority}


@ORDER_POLICIES.register(
    "edf",
    "Earliest deadline first: arrival plus the TTFT objective of the class, `ls_slo_s` or `be_slo_s`.",
    source="Liu and Layland, JACM 1973; QLLM, section 4, for 3 s",
)
class EarliestDeadline(OrderPolicy):
    """Earliest deadline first. The deadline of a request is its arrival plus the TTFT objective of its class.

    Bound: the difference of the two objectives, because a deadline never moves.

    Args:
        ls_slo_s: objective of latency-sensitive requests, seconds; 3 s in QLLM (section 4).
        be_slo_s: objective of best-effort requests, seconds. QLLM has none, and 30 s is ours.

    Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973.
    """

    def __init__(self, *, ls_slo_s: float = 3.0, be_slo_s: float = 30.0) -> None:
        for name, given in (("ls_slo_s", ls_slo_s), ("be_slo_s", be_slo_s)):
            if not 0 <= given < float("inf"):
                raise ConfigError(f"{name} must be seconds, 0 or more, got {given:g}")
        self._ls_slo_ns, self._be_slo_ns = to_ns(ls_slo_s), to_ns(be_slo_s)
        self.max_passed_over_ns = abs(self._be_slo_ns - self._ls_slo_ns)

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by deadline, then arrival."""
        return np.lexsort((view.serial, view.arrival_ns, self._deadline_ns(view)))

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        return {"seconds to deadline": (self._deadline_ns(view) - now_ns) / NS_PER_S}

    def _deadline_ns(self, view: WaitingView) -> NDArray[np.int64]:
        return view.arrival_ns + np.where(view.service_class == BE, self._be_slo_ns, self._ls_slo_ns)


class _Ageing(OrderPolicy):
    """Orders aged requests first, by arrival, and the others by a key of the subclass.

    Bound: the age. A request that arrives after another has aged can only age later, so it never passes the other.

    Args:
        theta_age_s: age in seconds. Infinity means no ageing and no bound.
    """

    def __init__(self, *, theta_age_s: float = 5.0) -> None:
        if not theta_age_s >= 0:
            raise ConfigError(f"theta_age_s must be seconds, 0 or more, or inf, got {theta_age_s:g}")
        self._theta_ns = to_ns(theta_age_s)
        self.max_passed_over_ns = None if self._theta_ns == FOREVER_NS else self._theta_ns

    def _aged_first(self, view: WaitingView, now_ns: int, key: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.lexsort((view.serial, view.arrival_ns, self._unless_aged(view, now_ns, key)))

    def _unless_aged(self, view: WaitingView, now_ns: int, key: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the key of each request; -1 for an aged one."""
        aged = now_ns - view.arrival_ns >= self._theta_ns
        return np.where(aged, np.int32(-1), key)

    def next_change_ns(self, view: WaitingView, now_ns: int) -> int:
        """Return the time at which the next request ages."""
        ages_ns = view.arrival_ns + self._theta_ns
        return int(ages_ns.min(initial=FOREVER_NS, where=ages_ns > now_ns))


@ORDER_POLICIES.register(
    "sjf",
    "Shortest prompt first; a request that has waited `theta_age_s` seconds goes before the others.",
    source="Gimbal v1, Algorithm 2 and section V-A2",
)
class Sjf(_Ageing):
    """Shortest prompt first; a request that has waited `theta_age_s` goes before the others. No output is predicted.

    Source: Gimbal v1, Algorithm 2. The paper's high priority (line 4) precedes every length. Its prefill length
    (line 6) is the whole prompt, cached or not. Requests of one priority are served in order of arrival. The age of 5 s
    is the paper's (V-A2), with a P99 TTFT of 4.9 s under high load.
    """

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by age, then prompt length, then arrival."""
        return self._aged_first(view, now_ns, view.num_prompt_tokens)

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        return {"prompt tokens (-1 if aged)": self._unless_aged(view, now_ns, view.num_prompt_tokens)}


@ORDER_POLICIES.register(
    "prefill_aware",
    "As `sjf`, by the tokens to compute that the prefix cache does not hold.",
    source="Gimbal v2, abstract; our reconstruction",
)
class PrefillAware(_Ageing):
    """Least uncached prefill first; a request that has waited `theta_age_s` goes before the others.

    Source: Gimbal v2 (our reconstruction). Its abstract only says "prefill-aware queue ordering policy with aging".
    """

    reads_cache = True

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by age, then uncached tokens, then arrival."""
        assert view.num_uncached is not None, "a policy with `reads_cache` gets this column"
        return self._aged_first(view, now_ns, view.num_uncached)

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        assert view.num_uncached is not None, "a policy with `reads_cache` gets this column"
        return {"uncached tokens (-1 if aged)": self._unless_aged(view, now_ns, view.num_uncached)}


@ORDER_POLICIES.register(
    "qllm",
    "Latency-sensitive first; best effort that has waited `theta_age_s` seconds counts as latency-sensitive.",
    source="QLLM, section 3.2; the ageing is ours",
)
class QllmOrder(OrderPolicy):
    """Latency-sensitive requests first, each class by arrival: the two prefill queues of QLLM's four.

    `batching.QllmBatches` implements the decode queues, and chooses the queue of each batch.

    Bound: none for best effort without ageing, as the paper admits (section 6). With ageing, the bound is the age: an
    older best-effort request counts as latency-sensitive in every decision.

    Args:
        theta_age_s: age in seconds. Infinity means no ageing, as in the paper.

    Source: QLLM, section 3.2.
    """

    puts_ls_first = True

    def __init__(self, *, theta_age_s: float = float("inf")) -> None:
        if not theta_age_s >= 0:
            raise ConfigError(f"theta_age_s must be seconds, 0 or more, or inf, got {theta_age_s:g}")
        self.promotes_after_ns = to_ns(theta_age_s)
        self.max_passed_over_ns = None if self.promotes_after_ns == FOREVER_NS else self.promotes_after_ns

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Order by class, then arrival."""
        return np.lexsort((view.serial, view.arrival_ns, self._classes(view, now_ns)))

    def keys(self, view: WaitingView, now_ns: int) -> dict[str, NDArray[Any]]:
        """Implement `OrderPolicy.keys`."""
        return {"class (0 is ls or aged)": self._classes(view, now_ns)}

    def _classes(self, view: WaitingView, now_ns: int) -> NDArray[np.uint8]:
        aged = now_ns - view.arrival_ns >= self.promotes_after_ns
        return np.where(aged, np.uint8(LS), view.service_class)

    def next_change_ns(self, view: WaitingView, now_ns: int) -> int:
        """Return the time at which the next best-effort request counts as latency-sensitive."""
        promoted_ns = view.arrival_ns + self.promotes_after_ns
        ahead = (promoted_ns > now_ns) & (view.service_class == BE)
        return int(promoted_ns.min(initial=FOREVER_NS, where=ahead))


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
