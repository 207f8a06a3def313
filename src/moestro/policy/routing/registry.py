"""Every routing policy by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

from moestro.errors import ConfigError
from moestro.policy.routing.basic import LeastLoaded, RoundRobin
from moestro.policy.routing.contract import RoutePolicy


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """How a policy is made (its settings are keyword arguments), and what it is in one line."""

    make: Callable[..., RoutePolicy]
    description: str


ROUTING: dict[str, PolicyEntry] = {
    "round_robin": PolicyEntry(RoundRobin, "The engines in turn."),
    "least_loaded": PolicyEntry(LeastLoaded, "Join the shortest queue: the fewest requests in flight."),
}


def make_policy(name: str, **settings: object) -> RoutePolicy:
    """The policy `name` with `settings` over its defaults.

    Raises:
        ConfigError: no policy, or no setting of it, has that name; or a value is not allowed.
    """
    if name not in ROUTING:
        raise ConfigError(f"unknown route policy {name!r}; known: {', '.join(ROUTING)}")
    make = ROUTING[name].make
    known = list(signature(make).parameters)
    for given in settings:
        if given not in known:
            raise ConfigError(f"route policy {name!r} has no setting {given!r}; it has: {', '.join(known) or 'none'}")
    return make(**settings)
