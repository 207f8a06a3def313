"""Policies by name, and their settings: named numbers, written `name=value` on the command line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moestro.errors import ConfigError

PolicyT = TypeVar("PolicyT")


@dataclass(frozen=True, slots=True)
class PolicyEntry(Generic[PolicyT]):
    """How a policy is made (its settings are keyword arguments), and what it does in one line."""

    make: Callable[..., PolicyT]
    description: str


def parse_settings(flag: str, pairs: Sequence[str]) -> dict[str, float]:
    """`("theta_age_s=5", "weight:ann=2")` as a dict.

    Args:
        flag: what the operator wrote them after, for messages.

    Raises:
        ConfigError: a pair is not NAME=NUMBER, or a name is there twice.
    """
    settings: dict[str, float] = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or math.isnan(value):
            raise ConfigError(f"{flag} {pair!r} is no setting: give NAME=NUMBER, for instance {flag} theta_age_s=5")
        if name in settings:
            raise ConfigError(f"{flag} gives {name} twice")
        settings[name] = value
    return settings


def make_policy(
    kind: str, known: Mapping[str, PolicyEntry[PolicyT]], name: str, settings: Mapping[str, float]
) -> PolicyT:
    """The policy `name` with `settings` over its defaults.

    Args:
        kind: what it is a policy of, for messages.

    Raises:
        ConfigError: no policy, or no setting of it, has that name; or a value is not allowed.
    """
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    make = known[name].make
    parameters = inspect.signature(make).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = [setting for setting in settings if setting not in parameters]
        if unknown:
            raise ConfigError(
                f"{kind} {name!r} has no setting {unknown[0]!r}; it has {', '.join(parameters) or 'none at all'}"
            )
    try:
        return make(**settings)
    except ConfigError as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from None
