"""The policies of one engine (order, batch, evict, share): contracts of the last three, and how all are registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.policy_registry import PolicyKind, errors_of
from moestro.core.views import BE, LS, BatchLimits, BatchView, EvictView, OrderPolicy, ShareView, Victim
from moestro.errors import ConfigError


class BatchPolicy(Protocol):
    """Fills the next plan. Both answers depend on what they are given alone."""

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Tokens that newcomers might be given beside the running ones, which are the rows of `view`.

        0 or less: no request can enter now, and the scheduler does not read the waiting queue.
        """
        ...

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """int32[n], tokens of each row in the next plan; 0: not in it.

        At most `num_left` each and the budget in all; at least one row gets something if there is any.
        """
        ...


class EvictPolicy(Protocol):
    """Chooses the running sequence that frees its KV when another finds no free block."""

    @property
    def makes_way(self) -> bool:
        """Whether a waiting latency-sensitive request that lacks a slot or blocks takes those of running best-effort
        sequences too. The view then has only these, and the order must put latency-sensitive requests first.
        """
        ...

    def __call__(self, view: EvictView) -> Victim:
        """The sequence to evict. The view is never empty."""
        ...


class SharePolicy(Protocol):
    """Divides an engine between clients whose sequences find no place, or more tokens to compute than a step has."""

    def __call__(self, view: ShareView) -> NDArray[np.float64]:
        """float64[n], part of the engine, above 0 and at most 1, that each client may claim before others have more."""
        ...


_PACKAGE = "moestro.engine.policies"


def _bound_in_words(policy: OrderPolicy) -> str:
    bound_ns = policy.max_passed_over_ns
    return "none in time" if bound_ns is None else f"{bound_ns / NS_PER_S:g} s"


def _order_needs_in_words(policy: OrderPolicy) -> str:
    return "the prefix cache" if policy.reads_cache else "none"


def _makes_way_in_words(policy: EvictPolicy) -> str:
    return "yes" if policy.makes_way else "no"


@dataclass(frozen=True, slots=True)
class UserEviction:
    """The evict policy of a user's file: a function, or an object that can be called.

    Attributes:
        choose: (view) -> the sequence to evict.
        name: flag and text that name the policy, for messages.
        makes_way: attribute of that name of the object; a function has none.
    """

    choose: Callable[[EvictView], Victim]
    name: str
    makes_way: bool

    def __call__(self, view: EvictView) -> Victim:
        """The sequence to evict. Its errors, and an answer that is no row of the view, are ConfigErrors."""
        with errors_of(self.name):
            return _checked_victim(self.choose(view), len(view.order_rank))


def _checked_victim(answer: Any, num_rows: int) -> Victim:
    """The answer of an evict policy, with numbers of Python.

    Raises:
        ConfigError: the answer is no victim among the rows.
    """
    is_victim = isinstance(answer, Victim) and isinstance(answer.row, int | np.integer) and 0 <= answer.row < num_rows
    if not is_victim:
        raise ConfigError(f"it answered {answer!r} for {num_rows} rows: a Victim of row 0 to {num_rows - 1} is wanted")
    return Victim(int(answer.row), bool(answer.keeps))


def _adapt_eviction(found: Any, text: str) -> EvictPolicy:
    name = f"{EVICT_POLICIES.flag} {text}"
    return UserEviction(found, name, makes_way=bool(getattr(found, "makes_way", False)))


def _try_eviction(policy: EvictPolicy) -> None:
    """Choose between a best-effort and a latency-sensitive sequence.

    Raises:
        ConfigError: the answer is no victim among the two. What the policy itself raises goes on.
    """
    view = EvictView(np.array([1, 0]), np.array([64, 32], np.int32), np.array([BE, LS], np.uint8), 128)
    _checked_victim(policy(view), len(view.order_rank))


ORDER_POLICIES: PolicyKind[OrderPolicy] = PolicyKind(
    "scheduling_policy",
    "--scheduling-policy",
    _PACKAGE,
    facts={"needs": _order_needs_in_words, "passed over for at most": _bound_in_words},
)
BATCH_POLICIES: PolicyKind[BatchPolicy] = PolicyKind("batch_policy", "--batch-policy", _PACKAGE)
EVICT_POLICIES: PolicyKind[EvictPolicy] = PolicyKind(
    "evict_policy",
    "--evict-policy",
    _PACKAGE,
    try_once=_try_eviction,
    facts={"also makes way for waiting requests": _makes_way_in_words},
    adapt=_adapt_eviction,
)
SHARE_POLICIES: PolicyKind[SharePolicy] = PolicyKind("share_policy", "--share-policy", _PACKAGE)
