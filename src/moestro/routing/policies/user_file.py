"""A policy of the user's own: a function or a class in a Python file, named `FILE.py:NAME`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moestro.core.load_figures import ROUTED_FIGURES
from moestro.core.user_code import load_policy
from moestro.errors import ConfigError
from moestro.routing.policies.contract import Needs, RouteEvent, RoutePolicy, RouteView
from moestro.routing.policies.scoring import Scored
from moestro.routing.policies.trial import try_once

logger = logging.getLogger(__name__)

_ANYTHING = Needs(hits=True, figures=ROUTED_FIGURES, otherwise="what the file does")


def user_policy(path: Path, name: str) -> RoutePolicy:
    """Load the file and make the policy of what is called `name` there.

    A function is a score: it takes a `RouteView` and returns float64[n], lower is better. A class is made without
    arguments and is a `RoutePolicy`: `needs`, `decide`, `observe`. Either is tried once on two made-up engines. What
    `observe` raises later is logged; what `decide` raises is its caller's affair.

    Raises:
        ConfigError: there is no such file or name in it, it cannot be run, or the trial fails; the text has the cause.
    """

    def tried(found: Any) -> RoutePolicy:
        has_state = hasattr(found, "decide")
        policy: RoutePolicy = found if has_state else Scored(_checked(found), name, _ANYTHING)
        try_once(policy)
        return _Guarded(policy, f"--route-policy {path}:{name}") if has_state else policy

    return load_policy("--route-policy", path, name, tried)


class _Guarded:
    """A class of the user's own. Its `observe` is told of what has happened already, to requests and engines that are
    to be cared for whatever it makes of it: so what it raises goes no further than the log.
    """

    def __init__(self, policy: RoutePolicy, text: str) -> None:
        self._policy = policy
        self._text = text
        self.needs = policy.needs
        self.decide = policy.decide

    def observe(self, event: RouteEvent) -> None:
        """See `RoutePolicy`."""
        try:
            self._policy.observe(event)
        except Exception:
            logger.exception("%s: observe failed on %s", self._text, type(event).__name__)


def _checked(score: Callable[[RouteView], Any]) -> Callable[[RouteView], Any]:
    """`score`, whose answer is one number an engine."""

    def checked(view: RouteView) -> Any:
        scores = np.asarray(score(view), np.float64)
        if scores.shape != (len(view.engines),):
            raise ConfigError(f"it returned shape {scores.shape} for {len(view.engines)} engines")
        return scores

    return checked
