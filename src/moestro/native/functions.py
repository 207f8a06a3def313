"""The functions of a compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

POINTER, INT, FLOAT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double
_PREFIX = "moestro_"


def load_functions(
    path: Path, arguments: Mapping[str, tuple[type, ...]], results: Mapping[str, type] | None = None
) -> dict[str, ctypes._NamedFuncPointer]:
    """Load a library, and return its functions by name.

    Args:
        path: The library.
        arguments: Types of the arguments of each function, by its name without the prefix of all names.
        results: Types of the results of functions that return something.

    Raises:
        OSError: The file is no library, or a function is not in it.
    """
    library, functions = ctypes.CDLL(str(path)), {}
    for name, types in arguments.items():
        try:
            function = library[_PREFIX + name]
        except AttributeError as error:
            raise OSError(f"{path} has no function {name}") from error
        function.argtypes, function.restype = types, (results or {}).get(name)
        functions[name] = function
    return functions
