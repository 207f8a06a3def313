"""Checks of the files that a verb writes at its end, before the work on what goes into them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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
