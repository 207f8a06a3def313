"""Imports one module of transformers without the start of its packages, which reads the sources of all its models.

That start takes half a second in every process, and the tokenizer and the chat templates need nothing of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def import_part(module: str, packages: tuple[str, ...] = ("transformers",)) -> ModuleType:
    """Import a module of transformers; its packages start only if it cannot be imported otherwise.

    A later import of a package, by whomever, starts it as usual and finds this module already loaded.

    Args:
        module: full name of the module.
        packages: packages around `module` that need not start, from the outermost inwards.

    Returns:
        The module.

    Raises:
        ImportError: transformers is not installed, or has no such module.
    """
    if "transformers" in sys.modules:
        return import_module(module)
    loaded = set(sys.modules)
    try:
        sys.modules.update(_not_started(packages))
        return import_module(module)
    except Exception:  # this version of transformers needs more of its packages, and any line may notice that
        for name in sys.modules.keys() - loaded:
            if name.partition(".")[0] == "transformers":
                del sys.modules[name]
        return import_module(module)
    finally:
        for package in packages:
            if isinstance(sys.modules.get(package), _NotStarted):
                del sys.modules[package]


class _NotStarted(ModuleType):
    """A package that only leads to its modules."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.__path__ = [str(folder)]
        self.__version__ = version("transformers")  # which its modules import from it


def _not_started(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("transformers is not installed")
    folder = Path(spec.submodule_search_locations[0])
    absent = [package for package in packages if package not in sys.modules]
    return {package: _NotStarted(package, folder.joinpath(*package.split(".")[1:])) for package in absent}
