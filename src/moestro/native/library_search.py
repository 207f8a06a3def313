"""Compiled libraries and their functions: found in the wheel or the cache, or compiled into it in the background."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Generic, TypeVar

from moestro.native.compiler import (
    PLAIN,
    CompilerError,
    InstructionSet,
    LibrarySource,
    accepts,
    compile_library,
    find_compiler,
    is_whole,
    library_name,
)

logger = logging.getLogger(__name__)

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


# The search for a library.

_OTHER_CACHE = "XDG_CACHE_HOME may name another folder"
T = TypeVar("T")


def cache_folder() -> Path:
    """Return the folder of libraries that were compiled on this machine.

    Raises:
        CompilerError: The user has no home.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "moestro" / "kernels"
    except RuntimeError as error:
        raise CompilerError(f"the user has no home folder for a cache; {_OTHER_CACHE}") from error


class LibrarySearch(Generic[T]):
    """A search for a compiled library. If it is absent, a background thread compiles it.

    Args:
        source: The library.
        chosen: Instruction set.
        load: Loads a compiled file; raises OSError where it was built for another system.
        prebuilt: Folder of the wheel's file. None means that of `source`.
        cache: Folder of compiled files. None means `cache_folder()`.
        lesser: Other instruction sets of this machine, the best first, for compilers that do not know `chosen`.

    Attributes:
        instruction_set: Name of the library's instruction set; that of `chosen` until it is found.
        library: The library, once `is_over`. None means that there is none, for the reason in `failure`.
        failure: Why there is none.
    """

    def __init__(
        self,
        source: LibrarySource,
        chosen: InstructionSet,
        load: Callable[[Path], T],
        prebuilt: Path | None = None,
        cache: Path | None = None,
        lesser: Sequence[InstructionSet] = (),
    ) -> None:
        self.instruction_set = chosen.name
        self._source, self._sets, self._load_file = source, (chosen, *lesser), load
        self._prebuilt, self._cache = prebuilt or source.prebuilt, cache
        self.library: T | None = None
        self.failure: str | None = None
        self._has_looked, self._over = threading.Event(), threading.Event()
        # A daemon: a process that ends does not wait for a compiler.
        threading.Thread(target=self._search, name=f"search for {source.title}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> T | None:
        """Wait for the end of the search. Returns the library, or None if there is none or the time is over."""
        self._over.wait(timeout_s)
        return self.library if self.is_over else None

    def look(self) -> T | None:
        """Wait until the wheel and the cache have been looked through: milliseconds. Returns the library of there."""
        self._has_looked.wait()
        return self.library

    def _search(self) -> None:
        try:
            self.library = self._find()
        except (CompilerError, OSError) as error:
            self.failure = str(error)
            logger.info("%s: not available: %s", self._source.title, error)
        finally:
            self._has_looked.set()
            self._over.set()

    def _find(self) -> T:
        """Find the library of the best instruction set, or else of the best one that can be had."""
        best, *lesser = self._sets
        found = self._load(self._prebuilt, best)
        if found is not None:
            return found
        try:
            cache = self._cache or cache_folder()
            found = self._load(cache, best)
            if found is not None:
                return found
            self._has_looked.set()
            return self._compile(cache)
        except CompilerError:
            for chosen in lesser:  # of a wheel whose compiler did not know the best one
                found = self._load(self._prebuilt, chosen)
                if found is not None:
                    return found
            raise

    def _compile(self, cache: Path) -> T:
        *better, least = self._sets
        find_compiler()  # without one, nothing needs to be written
        try:
            with _locked(cache, self._source.name):  # processes that start together compile once
                chosen = next((each for each in better if accepts(each)), least)
                found = self._load(cache, chosen)
                if found is not None:
                    return found
                path = compile_library(self._source, chosen, cache)
        except OSError as error:
            raise CompilerError(f"{cache} cannot be written: {error.strerror}; {_OTHER_CACHE}") from error
        logger.info("%s: compiled for %s into %s", self._source.title, chosen.name, path)
        self.instruction_set = chosen.name
        return self._load_file(path)

    def _load(self, folder: Path, chosen: InstructionSet) -> T | None:
        """Load the library from a folder, unless it is absent or damaged."""
        path = folder / library_name(self._source, chosen)
        if not is_whole(path):
            return None
        try:
            library = self._load_file(path)
        except OSError as error:
            logger.warning("%s: %s cannot be loaded: %s", self._source.title, path, error)
            return None
        self.instruction_set = chosen.name
        return library


class OptionalKernel(Generic[T]):
    """A compiled library with a plain twin, which computes the same in Python. Each process searches for it once.

    Args:
        source: The library, which needs no particular instruction set.
        load: Loads a compiled file; raises OSError where it was built for another system.
        is_wanted: Whether the first look begins the search, or only one after `want`.
    """

    def __init__(self, source: LibrarySource, load: Callable[[Path], T], *, is_wanted: bool = True) -> None:
        self._source, self._load, self._is_wanted = source, load, is_wanted
        self._library: T | None = None
        self._search: LibrarySearch[T] | None = None
        self._is_left_out = ContextVar("is_left_out", default=False)
        os.register_at_fork(after_in_child=self._forget_search)

    def want(self) -> None:
        """Let the next look begin the search. A process that only checks settings, and may fork, does not want it."""
        self._is_wanted = True

    def search(self) -> LibrarySearch[T]:
        """Return the search of this process, which begins with the first call."""
        self._is_wanted = True
        if self._search is None:
            self._search = LibrarySearch(self._source, PLAIN, self._load)
        return self._search

    def look(self) -> T | None:
        """Return the library. None means that Python computes: it is absent, left out, or still being compiled."""
        if self._is_left_out.get():
            return None
        if self._library is None and self._is_wanted:
            self._library = self.search().look()
        return self._library

    def wait(self, timeout_s: float | None = None) -> T | None:
        """Wait for the end of a search that has begun, and return what it has found."""
        return None if self._search is None else self._search.wait(timeout_s)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Let Python compute in the block, in this thread."""
        token = self._is_left_out.set(True)
        try:
            yield
        finally:
            self._is_left_out.reset(token)

    def _forget_search(self) -> None:
        self._search = None  # Its thread is not in a forked process.


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
