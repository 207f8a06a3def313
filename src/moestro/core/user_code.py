"""What a user's own Python file defines, named `FILE.py:NAME` on the command line."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from moestro.errors import ConfigError

PolicyT = TypeVar("PolicyT")


def load_policy(flag: str, path: Path, name: str, tried: Callable[[Any], PolicyT]) -> PolicyT:
    """The policy called `name` in the file.

    Args:
        flag: what the operator wrote it after, for messages.
        tried: makes a policy of what was found (of a class: of an object of it, made without arguments), and tries it
            once, so that a mistake shows now and not at the first request. Whatever it raises is a failed trial.

    Raises:
        ConfigError: there is no such file or name in it, it does not run, or the trial fails; the text has the cause.
    """
    found = _load_callable(flag, path, name)
    try:
        return tried(found() if isinstance(found, type) else found)
    except Exception as error:
        cause = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{flag} {path}:{name} failed its trial: {cause}") from error


def _load_callable(flag: str, path: Path, name: str) -> Any:
    """Run the file, and return what is called `name` in it."""
    if not path.is_file():
        raise ConfigError(f"{flag} {path}:{name}: there is no file {path}")
    module_name = f"moestro_{flag.strip('-').replace('-', '_')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where a dataclass looks for its annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{flag} {path}:{name}: {path} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{flag} {path}:{name}: {path} has no function or class {name!r}")
    return found
