"""Finds the compiled kernels: in the wheel, in the cache, or by compiling them in the background into the cache."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import torch

from moestro.model.kernels.compiler import (
    AMX_BF16,
    AVX2,
    AVX512,
    AVX512_BF16,
    PLAIN,
    PREBUILT,
    CompilerError,
    InstructionSet,
    built_sets,
    compile_kernels,
    find_compiler,
    is_whole,
    library_name,
)
from moestro.model.kernels.library import KernelLibrary

logger = logging.getLogger(__name__)


def _has_amx() -> bool:
    # The second asks the operating system for the tile registers, for all threads of this process.
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


_IS_USABLE: dict[InstructionSet, Callable[[], bool]] = {
    PLAIN: lambda: True,
    AVX2: torch.cpu._is_avx2_supported,
    AVX512: torch.cpu._is_avx512_supported,
    AVX512_BF16: torch.cpu._is_avx512_bf16_supported,
    AMX_BF16: _has_amx,
}


def usable_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this machine has, the least first."""
    return tuple(takewhile(lambda each: _IS_USABLE[each](), built_sets()))


def choose_instruction_set() -> InstructionSet:
    """Return the best instruction set that this machine has."""
    return usable_sets()[-1]


def cache_folder() -> Path:
    """Return the folder of kernels that were compiled on this machine."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "moestro" / "kernels"


class KernelBuild:
    """A search for the kernels, which compiles them in a thread of its own where they are absent.

    Args:
        chosen: Instruction set. None means the best of this machine.
        prebuilt: Folder of the wheel's kernels.
        cache: Folder of compiled kernels. None means `cache_folder()`.

    Attributes:
        instruction_set: Name of the instruction set.
        library: The kernels, once `is_over`. None means that there are none, for the reason in `failure`.
        failure: Why there are none.
    """

    def __init__(
        self, chosen: InstructionSet | None = None, prebuilt: Path = PREBUILT, cache: Path | None = None
    ) -> None:
        self._chosen = chosen or choose_instruction_set()
        self.instruction_set = self._chosen.name
        self._prebuilt, self._cache = prebuilt, cache
        self.library: KernelLibrary | None = None
        self.failure: str | None = None
        self._over = threading.Event()
        # A daemon: a process that ends does not wait for a compiler.
        threading.Thread(target=self._search, name="kernel build", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether the search has ended."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> KernelLibrary | None:
        """Wait for the end of the search. Returns the kernels, or None if there are none or the time is over."""
        self._over.wait(timeout_s)
        return self.library if self.is_over else None

    def _search(self) -> None:
        try:
            self.library = self._find()
        except (CompilerError, OSError, RuntimeError) as error:  # Path.home raises RuntimeError without a home
            self.failure = str(error)
            logger.info("CPU kernels are not available: %s", error)
        finally:
            self._over.set()

    def _find(self) -> KernelLibrary:
        found = self._load(self._prebuilt)
        if found is not None:
            return found
        cache = self._cache or cache_folder()
        found = self._load(cache)
        if found is not None:
            return found
        if find_compiler() is None:
            raise CompilerError("no C++ compiler was found")
        with _locked(cache):  # engines that start together compile once
            found = self._load(cache)
            if found is not None:
                return found
            path = compile_kernels(self._chosen, cache)
        logger.info("CPU kernels were compiled for %s into %s", self.instruction_set, path)
        return KernelLibrary(path, self.instruction_set)

    def _load(self, folder: Path) -> KernelLibrary | None:
        """Load the kernels from a folder, unless they are absent or damaged."""
        path = folder / library_name(self._chosen)
        if not is_whole(path):
            return None
        try:
            return KernelLibrary(path, self.instruction_set)
        except OSError:
            return None  # built for another system


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
