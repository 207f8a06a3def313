"""The search for the CPU kernels, and the instruction set that this machine gets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import torch

from moestro.model.kernels.library import KernelLibrary
from moestro.native.compiler import (
    AMX_BF16,
    AVX2,
    AVX512,
    AVX512_BF16,
    CPU_KERNELS,
    PLAIN,
    InstructionSet,
    instruction_set_of,
)
from moestro.native.library_search import LibrarySearch


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
    return tuple(takewhile(lambda each: _IS_USABLE[each](), CPU_KERNELS.built_sets()))


class KernelBuild(LibrarySearch[KernelLibrary]):
    """A search for the CPU kernels. If they are absent, a background thread compiles them.

    Args:
        chosen: Instruction set. None means the best of this machine that can be compiled.
        prebuilt: Folder of the wheel's kernels. None means that of the package.
        cache: Folder of compiled kernels. None means `cache_folder()`.
    """

    def __init__(
        self, chosen: InstructionSet | None = None, prebuilt: Path | None = None, cache: Path | None = None
    ) -> None:
        *lesser, best = usable_sets() if chosen is None else (chosen,)
        super().__init__(CPU_KERNELS, best, _load, prebuilt, cache, lesser[::-1])


def _load(path: Path) -> KernelLibrary:
    return KernelLibrary(path, instruction_set_of(path))
