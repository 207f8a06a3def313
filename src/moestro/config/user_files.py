"""Files that operators name: outputs, which are checked before the work, and Python files with policies, which run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from moestro.core.policy_registry import PolicyKind
from moestro.errors import ConfigError


def check_files(files: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written.

    Args:
        files: file of each flag. None means that the flag was not given.

    Raises:
        ConfigError: the folder of a file does not exist, the name is that of a folder, or writing is not permitted.
    """
    for flag, path in files.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            raise _cannot_write(flag, path, f"there is no folder {path.parent}")
        if path.is_dir():
            raise _cannot_write(flag, path, "it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _cannot_write(flag, path, "permission denied")


def check_folder(flag: str, path: Path) -> None:
    """Refuse a folder that cannot be made or written to. Missing folders above it count as made.

    Raises:
        ConfigError: a file has the name of one of them, or writing is not permitted.
    """
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise _cannot_write(flag, path, f"{nearest} is no folder")
    if not os.access(nearest, os.W_OK):
        raise _cannot_write(flag, path, "permission denied")


def _cannot_write(flag: str, path: Path, why: str) -> ConfigError:
    return ConfigError(f"{flag} {path} cannot be written: {why}")


# Policies in a user's own Python file, named `FILE.py:NAME` on the command line.


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
    module_name = str(path.resolve())  # the same for every flag that names the file, so that it runs once
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their annotations in the registered module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{flag} {path}:{name}: {path} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{flag} {path}:{name}: {path} has no function or class {name!r}")
    return found
