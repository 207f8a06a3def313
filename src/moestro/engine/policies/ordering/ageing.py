"""Orders in which a request that has waited long enough goes before the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS, to_ns
from moestro.core.views import BE, LS, WaitingView
from moestro.engine.policy_contract import OrderPolicy
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError


class _Ageing(OrderPolicy):
    """Aged requests first, as they came; the others by a key of the subclass.

    Bound: the age itself. One that arrives when another has aged already is never before it, for it can only age later.

    Args:
        theta_age_s: the age; infinite: nobody ages, and there is no bound.
    """

    def __init__(self, *, theta_age_s: float = 5.0) -> None:
        if not theta_age_s >= 0:
            raise ConfigError(f"theta_age_s must be seconds, 0 or more, or inf, got {theta_age_s:g}")
        self._theta_ns = to_ns(theta_age_s)
        self.max_passed_over_ns = None if self._theta_ns == FOREVER_NS else self._theta_ns

    def _aged_first(self, view: WaitingView, now_ns: int, key: NDArray[np.int32]) -> NDArray[np.int64]:
        aged = now_ns - view.arrival_ns >= self._theta_ns
        return np.lexsort((view.serial, view.arrival_ns, np.where(aged, -1, key)))

    def next_change_ns(self, view: WaitingView, now_ns: int) -> int:
        """When the next request ages."""
        ages_ns = view.arrival_ns + self._theta_ns
        return int(ages_ns.min(initial=FOREVER_NS, where=ages_ns > now_ns))


@ORDER_POLICIES.register(
    "sjf",
    "Shortest prompt first; a request that has waited `theta_age_s` seconds goes before the others.",
    source="Gimbal v1, Algorithm 2 and section V-A2",
)
class Sjf(_Ageing):
    """Shortest prompt first; who has waited `theta_age_s` goes before, as it came. Nobody's output is predicted.

    Source: Gimbal v1, Algorithm 2: its high priority (line 4) is before every length, its prefill length (line 6) is
    the prompt's, cached or not. Requests of one priority are served as they came. The age is the paper's (V-A2):
    5 s, with a P99 TTFT of 4.9 s under high load.
    """

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """By age, then prompt length, then arrival."""
        return self._aged_first(view, now_ns, view.num_prompt_tokens)


@ORDER_POLICIES.register(
    "prefill_aware",
    "As `sjf`, by the tokens that are left to compute after the prefix cache.",
    source="Gimbal v2, abstract; our reconstruction",
)
class PrefillAware(_Ageing):
    """Least prefill left first, after what the prefix cache holds; who has waited `theta_age_s` goes before.

    Gimbal v2 (our reconstruction): its abstract says "prefill-aware queue ordering policy with aging", no more.
    """

    reads_cache = True

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """By age, then tokens left to compute, then arrival."""
        assert view.num_uncached is not None, "the view lacks what `reads_cache` asks for"
        return self._aged_first(view, now_ns, view.num_uncached)


@ORDER_POLICIES.register(
    "qllm",
    "Latency-sensitive first; best effort that has waited `theta_age_s` seconds counts as latency-sensitive.",
    source="QLLM, section 3.2; the ageing is ours",
)
class QllmOrder(OrderPolicy):
    """Latency-sensitive requests first, each class as it came: two of QLLM's four queues, those of the prefill stage.

    The other two, and which queue a batch is made from, are `batching.QllmBatches`.

    Bound: none for best effort without ageing, as the paper admits (section 6). With it, a best-effort request counts
    as latency-sensitive from its age on, in every decision: then the bound is that age.

    Args:
        theta_age_s: the age; the paper has none.

    Source: QLLM, section 3.2.
    """

    puts_ls_first = True

    def __init__(self, *, theta_age_s: float = float("inf")) -> None:
        if not theta_age_s >= 0:
            raise ConfigError(f"theta_age_s must be seconds, 0 or more, or inf, got {theta_age_s:g}")
        self.promotes_after_ns = to_ns(theta_age_s)
        self.max_passed_over_ns = None if self.promotes_after_ns == FOREVER_NS else self.promotes_after_ns

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """By class, then arrival."""
        aged = now_ns - view.arrival_ns >= self.promotes_after_ns
        return np.lexsort((view.serial, view.arrival_ns, np.where(aged, LS, view.service_class)))

    def next_change_ns(self, view: WaitingView, now_ns: int) -> int:
        """When the next best-effort request is promoted."""
        promoted_ns = view.arrival_ns + self.promotes_after_ns
        ahead = (promoted_ns > now_ns) & (view.service_class == BE)
        return int(promoted_ns.min(initial=FOREVER_NS, where=ahead))
