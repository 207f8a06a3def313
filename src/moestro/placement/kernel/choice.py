"""Which code a search runs: the compiled kernel where it is found, else NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from moestro.native.compiler import PLACEMENT_KERNEL, PLAIN
from moestro.native.library_search import LibrarySearch
from moestro.placement.kernel.library import SearchKernel

_is_left_out = ContextVar("is_left_out", default=False)


@cache
def kernel_search() -> LibrarySearch[SearchKernel]:
    """Return the search for the kernel of this process, which begins with the first call."""
    return LibrarySearch(PLACEMENT_KERNEL, PLAIN, SearchKernel)


def search_kernel() -> SearchKernel | None:
    """Return the compiled kernel. None means that NumPy computes: it is absent, or is still being compiled."""
    return None if _is_left_out.get() else kernel_search().look()


def end_search(timeout_s: float) -> None:
    """Wait for a compilation that has begun, so that the next process finds the kernel; else each would begin one."""
    if kernel_search.cache_info().currsize:
        kernel_search().wait(timeout_s)


@contextmanager
def without_kernel() -> Iterator[None]:
    """Let NumPy compute in the block, in this thread."""
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)
