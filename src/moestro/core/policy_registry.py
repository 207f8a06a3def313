"""Policies by name, and their settings: `NAME:SETTING=VALUE,...`, wherever an operator names one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from moestro.errors import ConfigError

PolicyT = TypeVar("PolicyT")


@dataclass(frozen=True, slots=True)
class PolicyEntry(Generic[PolicyT]):
    """How a policy is made, and what it does in one line.

    Its settings are those keyword arguments whose default is a number or a word; a setting is of its default's kind.
    """

    make: Callable[..., PolicyT]
    description: str


def parse_policy(kind: str, text: str) -> tuple[str, dict[str, int | float | str]]:
    """`weighted_fair:output_cost=3,weight:ann=2` as ("weighted_fair", {"output_cost": 3, "weight:ann": 2}).

    Args:
        kind: what it is a policy of, for messages.

    Raises:
        ConfigError: a setting is not SETTING=VALUE, or is there twice.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, int | float | str] = {}
    for each in filter(None, rest.split(",")):
        setting, _, value = (part.strip() for part in each.rpartition("="))
        if not setting or not value:
            raise ConfigError(f"{kind} {text!r}: settings are written NAME:SETTING=VALUE,..., got {each!r}")
        if setting in settings:
            raise ConfigError(f"{kind} {text!r} gives {setting} twice")
        settings[setting] = _number_or_word(value)
    return name, settings


def _number_or_word(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return text if math.isnan(number) else number
    return text


def make_policy(
    kind: str, known: Mapping[str, PolicyEntry[PolicyT]], name: str, settings: Mapping[str, object]
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
    parameters = inspect.signature(make).parameters.values()
    defaults = {each.name: each.default for each in parameters if isinstance(each.default, int | float | str)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for setting, value in settings.items():
        if setting in defaults:
            wanted = _unlike(value, defaults[setting])
            if wanted:
                raise ConfigError(f"{kind} {name!r}: {setting} must be {wanted}, got {value!r}")
        elif not takes_any:
            raise ConfigError(
                f"{kind} {name!r} has no setting {setting!r}; it has {', '.join(defaults) or 'none at all'}"
            )
    try:
        return make(**settings)
    except (
        ConfigError,
        TypeError,
        ValueError,
        ArithmeticError,
    ) as error:  # all but the first: of values that fit no number
        raise ConfigError(f"{kind} {name!r}: {error}") from None


def _unlike(value: object, default: float | str) -> str | None:
    """What `value` should have been, in words; None: it is of the default's kind."""
    if isinstance(default, str):
        return None if isinstance(value, str) else "a word"
    if isinstance(default, int):
        return None if isinstance(value, int) else "a whole number"
    return None if isinstance(value, int | float) else "a number"
