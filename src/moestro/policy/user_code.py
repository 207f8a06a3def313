"""What a user's own Python file defines, named `FILE.py:NAME` on the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from moestro.errors import ConfigError


def load_callable(flag: str, path: Path, name: str) -> Any:
    """Run the file, and return what is called `name` in it.

    Args:
        flag: what the operator wrote it after, for messages.

    Raises:
        ConfigError: there is no such file, it does not run, or `name` is nothing that can be called.
    """
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
