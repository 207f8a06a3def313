"""Checks that hold for the numbers of all settings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection

from moestro.errors import ConfigError

# Settings are seconds, requests a second, GiB and shares. A larger value is a mistake, and would overflow clocks.
MAX_SETTING = 1e9


def flag_of(name: str) -> str:
    """Command-line flag of the setting `name`."""
    return "--" + name.replace("_", "-")


def check_floats(
    settings: object, label: Callable[[str], str] = flag_of, may_be_infinite: Collection[str] = ()
) -> None:
    """Refuse NaN, inf and numbers beyond `MAX_SETTING` in any float field of `settings`.

    Args:
        settings: a dataclass or msgspec struct; fields of other types are not checked.
        label: gives the operator's name of a field.
        may_be_infinite: fields in which inf means "no limit".

    Raises:
        ConfigError: a value is not allowed; the message names the field and the value.
    """
    names = [name for kind in type(settings).__mro__ for name in inspect.get_annotations(kind)]
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, float) or abs(value) <= MAX_SETTING:
            continue
        if value != math.inf or name not in may_be_infinite:
            raise ConfigError(f"{label(name)} must be a number up to {MAX_SETTING:g}, got {value:g}")
