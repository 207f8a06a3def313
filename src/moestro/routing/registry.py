"""Registry of routing policies: makes a policy from its text form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from moestro.core.load_figures import ROUTED_FIGURES
from moestro.core.policy_registry import PolicyKind
from moestro.core.request import Request, SamplingParams
from moestro.core.rng import Draws
from moestro.core.views import EngineTable
from moestro.errors import ConfigError
from moestro.routing.policy_contract import Needs, RouteEvent, RouteInputs, RoutePolicy, RouteView
from moestro.routing.score_expression import expression_policy
from moestro.routing.scoring import Scored

logger = logging.getLogger(__name__)

_ANYTHING = Needs(hits=True, figures=ROUTED_FIGURES, otherwise="what the file does")


ANY_INPUTS = RouteInputs()


def policy_from(text: str, score: str | None = None, inputs: RouteInputs = ANY_INPUTS) -> RoutePolicy:
    """Make the policy that an operator named. Servers, routers and simulations all make theirs here.

    Args:
        text: a name in ROUTE_POLICIES with optional settings (`bailian:hit_weight=0.55`), or `FILE.py:NAME`.
        score: an expression over indicators, which replaces `text`.
        inputs: what the router's owner can supply.

    Raises:
        ConfigError: no such policy exists, it does not accept these settings, or it requires what cannot be supplied.
    """
    if score is None:
        policy = ROUTE_POLICIES.make(text, predict_ttft_ns=inputs.predict_ttft_ns)
    else:
        policy = expression_policy(score)
    if lacking := inputs.lacking(policy.needs):
        flag = f"--route-policy {text}" if score is None else f"--route-score {score!r}"
        raise ConfigError(
            f"{flag} requires {' and '.join(lacking)}, which no engine can report here."
            f" {inputs.remedy or 'Choose another policy.'}"
        )
    return policy


def _try_once(policy: RoutePolicy) -> None:
    """Let a policy decide between two engines without reports, to find errors before serving.

    Raises:
        ConfigError: the policy chose an engine that does not exist. Exceptions of the policy itself propagate.
    """
    request = Request(request_id="trial", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)
    view = RouteView(request, EngineTable.blank(2), np.zeros(2, np.int64), 16, 0, 0)
    engine = policy.decide(view, Draws(0, 0)).engine
    if engine not in (0, 1):
        raise ConfigError(f"it chose engine {engine!r} of two")
    assert policy.needs is not None
    assert callable(policy.observe)


def _adapt(found: Any, text: str) -> RoutePolicy:
    """Make a policy of an object in a user's file.

    An object with `decide` is a `RoutePolicy`. A function is a score: it takes a `RouteView` and returns float64[n],
    lower is better. Exceptions of `observe` are logged; those of `decide` reach the caller.
    """
    if hasattr(found, "decide"):
        return _Guarded(found, f"{ROUTE_POLICIES.flag} {text}")
    return Scored(_checked(found), text.partition(":")[2], _ANYTHING)


class _Guarded:
    """A policy of a user's file, whose errors in `observe` are only logged.

    Observed events have already happened, and the router serves their requests and engines in any case.
    """

    def __init__(self, policy: RoutePolicy, text: str) -> None:
        self._policy = policy
        self._text = text
        self.decide = policy.decide

    @property
    def needs(self) -> Needs:
        """Inputs that the user's policy reads."""
        return self._policy.needs

    def observe(self, event: RouteEvent) -> None:
        """Pass the event to the user's policy, and log its exceptions."""
        try:
            self._policy.observe(event)
        except Exception:
            logger.exception("%s: observe failed on %s", self._text, type(event).__name__)


def _checked(score: Callable[[RouteView], Any]) -> Callable[[RouteView], Any]:
    """Wrap `score` so that a result other than one number per engine raises ConfigError."""

    def checked(view: RouteView) -> Any:
        scores = np.asarray(score(view), np.float64)
        if scores.shape != (len(view.engines),):
            raise ConfigError(f"it returned shape {scores.shape} for {len(view.engines)} engines")
        return scores

    return checked


ROUTE_POLICIES: PolicyKind[RoutePolicy] = PolicyKind(
    "route policy",
    "--route-policy",
    "moestro.routing.policies",
    try_once=_try_once,
    facts={"needs": lambda policy: policy.needs.in_words()},
    adapt=_adapt,
    offered=("predict_ttft_ns",),
)
