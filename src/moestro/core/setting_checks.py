"""Ranges and choices of settings: declared beside each field, checked by one function."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError

# Settings are seconds, requests a second, GiB and shares. A larger number is a mistake, and clocks overflow on it.
MAX_SETTING = 1e9


@dataclass(frozen=True, slots=True)
class Allowed:
    """The allowed range of a numeric setting, as metadata: `Annotated[int, at_least(1)]`.

    Attributes:
        low, high: bounds.
        is_above: `low` itself is not allowed.
        may_be_infinite: inf means no limit; else a float may be `MAX_SETTING` at most.
    """

    low: float = -math.inf
    high: float = math.inf
    is_above: bool = False
    may_be_infinite: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.is_above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if not self.is_above and self.high < math.inf:
            return f"between {_shown(self.low)} and {_shown(self.high)}"
        low = f"above {_shown(self.low)}" if self.is_above else f"at least {_shown(self.low)}"
        return low if self.high == math.inf else f"{low} and at most {_shown(self.high)}"


def at_least(low: float, *, may_be_infinite: bool = False) -> Allowed:
    """`low` or more."""
    return Allowed(low, may_be_infinite=may_be_infinite)


def above(low: float, at_most: float = math.inf, *, may_be_infinite: bool = False) -> Allowed:
    """More than `low`, and `at_most` at most."""
    return Allowed(low, at_most, is_above=True, may_be_infinite=may_be_infinite)


def between(low: float, high: float) -> Allowed:
    """`low` to `high`, both allowed."""
    return Allowed(low, high)


PORT = between(0, 65_535)


@dataclass(frozen=True)
class CheckedSettings:
    """Base of a settings dataclass: every field is checked when a value is made.

    Attributes:
        PLACE: precedes a field's name in messages, such as "[engines] " for a table of a file. None: messages name the
            command-line flag.
    """

    PLACE: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_settings(self)


# A simulation as a library has no command line. To load cyclopts and all policies takes as much time as to simulate a
# thousand requests, so these functions use cyclopts only where it is loaded already: in a process that may print help.


def flag_help(text: str, policies: PolicyKind[Any] | None = None) -> Any:
    """The help text of a flag that no docstring can be, as metadata: `Annotated[str, flag_help(f"...")]`.

    Args:
        policies: the kind of policy that the flag takes. Their list follows the text. None means another flag.
    """
    cyclopts = sys.modules.get("cyclopts")
    if cyclopts is None:
        return text
    return cyclopts.Parameter(help=text if policies is None else f"{text}\n\n{_listed(policies)}")


@functools.cache
def _listed(policies: PolicyKind[Any]) -> str:
    return policies.help_text()


def flag_group(name: str, text: str, sort_key: int) -> Any:
    """The group of a flag in `--help`, as metadata.

    Args:
        text: help text of the group.
        sort_key: place of the group among the others.
    """
    cyclopts = sys.modules.get("cyclopts")
    return text if cyclopts is None else cyclopts.Parameter(group=cyclopts.Group(name, help=text, sort_key=sort_key))


def flag_of(name: str) -> str:
    """The command-line flag of the setting `name`."""
    return "--" + name.replace("_", "-")


def name_of(settings: object, name: str) -> str:
    """What an operator calls the field `name` of `settings`, in messages."""
    place: str | None = getattr(settings, "PLACE", None)
    return flag_of(name) if place is None else place + name


def check_settings(settings: object) -> None:
    """Check each field of `settings` against its `Allowed` range and its Literal's choices. None is always allowed.

    Args:
        settings: a dataclass or msgspec struct. A field that a subclass declares again keeps the range of its base.

    Raises:
        ConfigError: a value is not allowed; the text names the field, the value, and what is allowed.
    """
    kind: type = type(settings)
    for rule in _rules(kind):
        value = getattr(settings, rule.name)
        if problem := rule.problem(value):
            raise ConfigError(f"{name_of(settings, rule.name)} {problem}")


def choices_of(kind: type, name: str) -> tuple[object, ...]:
    """The values that the setting `name` of the dataclass or struct `kind` may have; empty: it is no such setting."""
    return next((rule.choices for rule in _rules(kind) if rule.name == name), ())


def fields_of(settings: CheckedSettings, kind: type[CheckedSettings]) -> dict[str, Any]:
    """The values that `settings` has for the fields of the dataclass `kind`, which is a base of it."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    allowed: Allowed
    choices: tuple[object, ...]

    def problem(self, value: object) -> str | None:
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"{value!r} is unknown: give one of {', '.join(map(str, self.choices))}"
        if isinstance(value, float) and not abs(value) <= MAX_SETTING:
            if value != math.inf or not self.allowed.may_be_infinite:
                return f"must be a number up to {MAX_SETTING:g}, got {value:g}"
        elif isinstance(value, int | float) and value not in self.allowed:
            return f"must be {self.allowed}, got {_shown(value)}"
        return None


@functools.cache
def _rules(kind: type) -> tuple[_Rule, ...]:
    hints: dict[str, list[Any]] = {}
    for each in kind.__mro__:
        for name, hint in inspect.get_annotations(each, eval_str=True).items():
            hints.setdefault(name, []).extend(_parts(hint))
    return tuple(_Rule(name, _allowed(parts), _choices(parts)) for name, parts in hints.items())


def _parts(hint: Any) -> Iterator[Any]:
    """The hint's metadata, and the members of its union."""
    if typing.get_origin(hint) is typing.Annotated:
        yield from hint.__metadata__
        yield from _parts(hint.__origin__)
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from _parts(each)
    else:
        yield hint


def _allowed(parts: list[Any]) -> Allowed:
    return next((part for part in parts if isinstance(part, Allowed)), Allowed())


def _choices(parts: list[Any]) -> tuple[object, ...]:
    return next((typing.get_args(part) for part in parts if typing.get_origin(part) is Literal), ())


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
