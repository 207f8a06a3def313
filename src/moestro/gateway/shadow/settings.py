"""Settings of a shadow, which decides beside the router in use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from moestro.core.setting_checks import CheckedSettings
from moestro.errors import ConfigError

_SHADOW = Group.create_ordered(
    "Shadow", help="Decide beside the router in use, and send engines no request: what would --route-policy change?"
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ShadowSettings(CheckedSettings):
    """Settings of the shadow."""

    shadow: Annotated[bool, Parameter(group=_SHADOW, negative=())] = False
    (
        "Take copies of requests (nginx' mirror, Envoy's request_mirror_policies) on --port, answer them with 202, and"
        " record what --route-policy would decide. moestro sim --replay RECORD then states what it would change."
    )
    access_log: Annotated[Path | None, Parameter(group=_SHADOW)] = None
    "Access log of the router in use, which a shadow follows: JSON lines of nginx or Envoy, as docs/shadow.md has them."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadow and self.access_log is None:
            raise ConfigError("--shadow needs --access-log: without it the engine of a request is unknown")

    def check_stands_alone(self, flags: dict[str, bool]) -> None:
        """Check that a shadow is not given what a router needs that sends requests.

        Args:
            flags: whether each flag that needs such a router is given.

        Raises:
            ConfigError: One is.
        """
        if self.shadow and (given := [flag for flag, is_given in flags.items() if is_given]):
            raise ConfigError(f"--shadow sends no request, so {given[0]} has no meaning: leave it out")
