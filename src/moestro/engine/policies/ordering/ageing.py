"""Order policies with ageing: a request that has waited long enough goes first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS, to_ns
from moestro.core.order_contract import OrderPolicy
from moestro.core.views import BE, LS, WaitingView
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError


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
