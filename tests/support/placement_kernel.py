"""The compiled kernel of the placement search."""

from __future__ import annotations

import pytest

from moestro.placement.kernel.choice import SearchKernel, kernel_search


def kernel() -> SearchKernel:
    """The kernel, in the user's cache afterwards; the test is skipped where no compiler is."""
    found = kernel_search().wait()
    if found is None:
        pytest.skip(f"no placement kernel: {kernel_search().failure}")
    return found
