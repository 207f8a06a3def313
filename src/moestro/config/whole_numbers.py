"""Whole numbers with a suffix, as vLLM's flags take them: 8k, 25.6k, 2G."""

from __future__ import annotations

import re
import typing
from decimal import Decimal

from cyclopts import App, ArgumentCollection

from moestro.errors import ConfigError

_FORM = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
# vLLM's words for a limit that the model decides, which is what the setting means unset.
_UNSET = {"--max-model-len": frozenset({"auto", "-1"})}


class SuffixedNumbers:
    """Writes out suffixed numbers wherever a setting is a whole number, for cyclopts.

    A small letter stands for powers of 1,000 and a capital for powers of 1,024, in flags, environment variables and
    files alike. It adds no settings and must come after the sources that do.
    """

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Replace the tokens of `arguments`; an error names the flag and the value."""
        for argument in arguments:
            if argument.tokens and int in (argument.hint, *typing.get_args(argument.hint)):
                if argument.tokens[-1].value in _UNSET.get(argument.name, ()):
                    argument.tokens.clear()
                argument.tokens[:] = [
                    token.evolve(value=_written_out(argument.name, token.value)) for token in argument.tokens
                ]


def _written_out(name: str, value: str) -> str:
    match = _FORM.fullmatch(value.strip())
    if match is None:
        return value
    number, suffix = Decimal(match[1]), match[2]
    if suffix.isupper() and "." in match[1]:
        raise ConfigError(
            f"{name} {value}: {suffix} counts in powers of 1,024 and takes whole numbers; "
            f"{match[1]}{suffix.lower()} counts in powers of 1,000"
        )
    written = number * (1024 if suffix.isupper() else 1000) ** _POWERS[suffix.lower()]
    if written % 1:
        raise ConfigError(f"{name} {value}: must be a whole number, got {written:f}")
    return str(int(written))
