"""Sources of settings besides the command line, and the origin of each value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, Group, Parameter
from cyclopts.config import Dict

from moestro.config.config_file import read_config_file
from moestro.config.vllm_flags import flag_named, take_or_refuse, warn_of_taken
from moestro.errors import ConfigError

SECRETS = frozenset({"api_key", "router_api_key", "engine_api_key", "admin_api_key"})
_NOT_IN_FILES = frozenset({"config", "print-config"})


@Parameter(name="*", group=Group("Configuration", help="Settings from a file.", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Flags of every verb that reads a file of settings."""

    config: Path | None = None
    "A YAML or TOML file of settings with the names of flags. Flags beat the environment, and both beat the file."
    print_config: Annotated[bool, Parameter(negative=())] = False
    "Show every setting and its source, in a form that --config reads, and exit."


class ConfigFile:
    """Reads the file that the verb's `--config` names, for cyclopts. Flags and environment variables win over it."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the file's settings to `arguments`; an error names the key or value and its line."""
        option = next((argument for argument in arguments if "--config" in argument.names), None)
        if option is None or not option.tokens:
            return
        taken: list[str] = []
        for entry in read_config_file(Path(option.tokens[-1].value).expanduser()):
            if entry.key.replace("_", "-") in _NOT_IN_FILES:
                raise ConfigError(f"{entry.place}: {entry.key} is for the command line only")
            flag = f"--{entry.key}".replace("_", "-")
            if flag_named(flag) is None or any(flag in argument.names for argument in arguments):
                Dict({entry.key: entry.value}, source=entry.place)(app, (), arguments)
                continue
            try:
                take_or_refuse(flag, str(entry.value))
            except ConfigError as error:
                raise ConfigError(f"{entry.place}: {error}") from None
            taken.append(flag)
        warn_of_taken(taken)


class Origins:
    """Remembers the origin of each value, for cyclopts. It adds no settings and must be the last source."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Remember the sources of `arguments`."""
        self._of.clear()
        for argument in arguments:
            if argument.tokens:
                token = argument.tokens[0]
                named = {"cli": "command line", "env": f"environment variable {token.keyword}"}
                self._of[argument.field_info.name] = named.get(token.source, token.source)

    def of(self, name: str) -> str:
        """The origin of the setting `name`, in words."""
        return self._of.get(name, "default")


def config_lines(settings: object, origins: Origins) -> Iterator[str]:
    """Yield the dataclass `settings` as lines of YAML that `--config` reads; each line names the origin of its value.

    Secrets are not shown.
    """
    for name, value in settings_in(settings):
        if name in SECRETS and value:
            yield f"# {name}: not shown  # {origins.of(name)}"
        else:
            yield f"{name}: {json.dumps(value, default=str)}  # {origins.of(name)}"


def settings_in(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every setting in a dataclass and in the groups that it is composed of."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from settings_in(value)
        else:
            yield each.name, value
