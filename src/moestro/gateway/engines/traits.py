"""What an operator says of an engine behind its address: `URL,speed=2,group=a`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moestro.errors import ConfigError
from moestro.routing.settings import ANY_ENGINE, EngineSpec

NO_GROUP = "none"
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")
_BOUNDS: Mapping[str, tuple[float, float]] = {"speed": (0.01, 100), "copy_price": (0, 1)}
_NAMES = (*_BOUNDS, "group")


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Traits of the engines behind one address.

    Attributes:
        spec: speed and copy price; None in it means that the router learns them.
        group: name of the group whose engines begin every step together. NO_GROUP means that each steps alone. None
            means that the ranks of the address are one group.
    """

    spec: EngineSpec = ANY_ENGINE
    group: str | None = None

    @classmethod
    def parse(cls, place: str, traits: Sequence[str]) -> EngineTraits:
        """Parse traits, each as NAME=VALUE.

        Args:
            place: Where they stand, for the error.

        Raises:
            ConfigError: a trait is unknown, given twice or out of range.
        """
        found: dict[str, str] = {}
        for trait in traits:
            name, _, value = trait.partition("=")
            if name not in _NAMES or name in found:
                problem = "is given twice" if name in found else "is no trait of an engine"
                raise ConfigError(f"{place}: {name!r} {problem}; give {', '.join(_NAMES)}, each once")
            found[name] = value
        group = found.pop("group", None)
        if group is not None and not _GROUP.fullmatch(group):
            raise ConfigError(
                f"{place}: a group has letters, digits and . _ - in it, 64 at most; group={NO_GROUP} means that"
                " data-parallel ranks step alone"
            )
        speed, copy_price = (_number(place, name, found[name]) if name in found else None for name in _BOUNDS)
        return cls(EngineSpec(speed=speed, copy_price=copy_price), group)


ANY_TRAITS = EngineTraits()


def _number(place: str, name: str, value: str) -> float:
    least, most = _BOUNDS[name]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(f"{place}: {name}={value}: give a number from {least:g} to {most:g}")
    return number
