"""One decision for trial: what cannot work shows when a policy is made, and not in every request."""

from __future__ import annotations

import numpy as np

from moestro.core.request import Request, SamplingParams
from moestro.core.rng import Draws
from moestro.core.views import EngineTable
from moestro.errors import ConfigError
from moestro.routing.policies.contract import RoutePolicy, RouteView


def try_once(policy: RoutePolicy) -> None:
    """Decide over two engines of which nothing is reported.

    Raises:
        ConfigError: an engine was chosen that is not there. What the policy itself raises goes on.
    """
    request = Request(request_id="trial", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)
    engine = policy.decide(
        RouteView(request, EngineTable.blank(2), np.zeros(2, np.int64), 16, 0, 0), Draws(0, 0)
    ).engine
    if engine not in (0, 1):
        raise ConfigError(f"it chose engine {engine!r} of two")
    assert policy.needs is not None
    assert callable(policy.observe)
