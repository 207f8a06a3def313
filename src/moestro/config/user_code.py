"""Reads policies from a user's own Python file, named `FILE.py:NAME` on the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError


def accept_user_code() -> None:
    """Let operators name policies as `FILE.py:NAME` in this process, which then runs the file."""
    PolicyKind.read_user_code = read_user_code


def read_user_code(flag: str, path: Path, name: str) -> object:
    """Run the file and return the function, class or callable object `name` of it.

    Args:
        flag: command-line flag that named the file, for messages.

    Raises:
        ConfigError: the file or the name does not exist, or the file does not run; the text has the cause.
    """
    if not path.is_file():
        raise ConfigError(f"{flag} {path}:{name}: there is no file {path}")
    module_name = str(path.resolve())  # one name for each file, whichever flags name it
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look for their annotations there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{flag} {path}:{name}: {path} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{flag} {path}:{name}: {path} has no function or class {name!r}")
    return found
