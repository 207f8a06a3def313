"""Orders the waiting requests of other engines by Moestro's order policies.

vLLM and SGLang have a priority in each request, which some of their own decisions read, and a free object of fields. A
request's class and user are two of these fields, or its class follows from its priority.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.hashing import name_key
from moestro.core.request import ServiceClass
from moestro.core.views import BE, LS, OrderPolicy, WaitingView
from moestro.engine.registry import ORDER_POLICIES
from moestro.engine.waiting import MAX_LOOKED_UP, waiting_view
from moestro.errors import ConfigError

CLASS_KEY, USER_KEY = "service_class", "user"  # names in a request's free fields, which are Moestro's API fields
BE_PRIORITY = "be_priority"  # the one setting that is ours and not the policy's
_CLIENT = 0  # of all requests: these engines do not say who sent one
_INT32 = np.iinfo(np.int32)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostOrder:
    """An order policy beside the priorities of another engine.

    Attributes:
        policy: Order policy.
        be_priority: Requests of this priority or a less urgent one are best effort, unless they state a class. None
            means that priorities say nothing about classes.
        has_levels: Whether more urgent priorities come first, and the policy orders requests of one priority. An engine
            that preempts by priority needs that, unless priorities are classes.
        low_first: Whether lower numbers are more urgent.
    """

    policy: OrderPolicy
    be_priority: int | None = None
    has_levels: bool = False
    low_first: bool = True

    def view(self, rows: NDArray[np.void], num_cached: Callable[[int], int] | None) -> WaitingView:
        """Return the policy's view of rows of `WAITING_COLUMNS`.

        Args:
            rows: Waiting requests.
            num_cached: (number of a row) -> how many of the request's first tokens the prefix cache holds. Only the
                oldest rows are looked up, as in Moestro's own engine, and only where the policy reads the cache.
        """
        if not self.policy.reads_cache:
            return waiting_view(rows, None)
        assert num_cached is not None, "a policy that reads the prefix cache needs num_cached"
        num_uncached: NDArray[np.int32] = rows["num_tokens"].copy()
        for i in np.argsort(rows["arrival_ns"], kind="stable")[:MAX_LOOKED_UP].tolist():
            num_uncached[i] -= min(num_cached(i), int(num_uncached[i]) - 1)
        return waiting_view(rows, num_uncached)

    def order(self, view: WaitingView, now_ns: int) -> NDArray[np.int64]:
        """Return int64[n], indices of all rows, the first to be admitted first."""
        order = self.policy.order(view, now_ns)
        return order[np.argsort(view.priority[order], kind="stable")] if self.has_levels else order

    def row(self, serial: int, arrival_ns: int, num_tokens: tuple[int, int], priority: int, given: Any) -> Any:
        """Make a row of `WAITING_COLUMNS`.

        Args:
            serial: Unique number, in order of arrival in the queue.
            arrival_ns: Time of arrival.
            num_tokens: Tokens of the prompt, and those of the prompt and of the answer so far.
            priority: The engine's priority of the request.
            given: The request's free fields; anything but a mapping counts as none.
        """
        fields = given if isinstance(given, Mapping) else {}
        urgency = priority if self.low_first else -priority
        # A priority has no bounds, and the column has 32 bits.
        column = min(max(urgency, _INT32.min), _INT32.max)
        service_class = self._class_of(fields, priority)
        return arrival_ns, serial, user_of(fields), _CLIENT, *num_tokens, column, service_class

    def _class_of(self, fields: Mapping[str, Any], priority: int) -> int:
        """Return LS or BE; the engine has accepted the request already, so another word counts as latency-sensitive."""
        given = fields.get(CLASS_KEY)
        if given is None and self.be_priority is not None:
            is_be = priority >= self.be_priority if self.low_first else priority <= self.be_priority
            return BE if is_be else LS
        word = given if isinstance(given, str) else None  # clients may send anything, also lists
        if given is not None and word not in tuple(ServiceClass):
            _logger.warning("%s %r is neither 'ls' nor 'be'; the request counts as 'ls'", CLASS_KEY, given)
        return BE if word == ServiceClass.BE else LS

    def in_words(self) -> str:
        """Return what the order promises, for the log."""
        words = [bound_in_words(self.policy)]
        if self.has_levels:
            words.append("requests of a more urgent priority come first")
        if self.be_priority is not None:
            side = "above" if self.low_first else "below"
            words.append(f"priority {self.be_priority} and {side} is best effort")
        return "; ".join(words)


def host_order(text: str, be_priority: int | None, *, reads_priority: bool, low_first: bool = True) -> HostOrder:
    """Make an order policy for another engine.

    Args:
        text: `NAME` or `NAME:SETTING=VALUE,...`.
        be_priority: As in `HostOrder`.
        reads_priority: Whether the engine itself preempts by priority.
        low_first: As in `HostOrder`.

    Raises:
        ConfigError: The policy has no such setting, or a value is out of range.
    """
    policy = ORDER_POLICIES.make(text)
    return HostOrder(policy, be_priority, reads_priority and be_priority is None, low_first)


def text_and_class(name: str, settings: Mapping[str, object], place: str) -> tuple[str, int | None]:
    """Return `NAME:SETTING=VALUE,...` of a policy, and `be_priority`, from one object of settings.

    Args:
        name: Name of the policy.
        settings: Settings of the policy, and `be_priority`.
        place: Where the settings stand, for messages.

    Raises:
        ConfigError: A setting is no number and no word, or `be_priority` no whole number.
    """
    for setting, value in settings.items():
        if not isinstance(value, int | float | str) or isinstance(value, bool):
            raise ConfigError(f"{place}: {setting} must be a number, got {value!r}")
    others = dict(settings)
    be_priority = others.pop(BE_PRIORITY, None)
    if be_priority is not None and not isinstance(be_priority, int):
        raise ConfigError(f"{place}: {BE_PRIORITY} must be a whole number, got {be_priority!r}")
    text = ",".join(f"{setting}={value}" for setting, value in others.items())
    return (f"{name}:{text}" if text else name), be_priority


def user_of(fields: Mapping[str, Any]) -> int:
    """Return the key of the user whom the client named; all requests without a name share one."""
    user = fields.get(USER_KEY)
    return name_key(None if user is None else str(user))


def bound_in_words(policy: OrderPolicy) -> str:
    """Return how long a later arrival can still pass a request."""
    bound_ns = policy.max_passed_over_ns
    if bound_ns is None:
        return "no bound in time on being passed over"
    return f"a request is passed over only by those that arrive up to {bound_ns / NS_PER_S:g} s after it"
