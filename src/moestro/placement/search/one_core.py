"""Linear algebra on one core: the threads of a BLAS library wait for each other by spinning.

Beside busy engines, a plan for 144 devices took 22 to 31 s of processor time with two threads of OpenBLAS, and 0.15 s
with one; on idle cores two threads save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from threadpoolctl import ThreadpoolController

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _libraries() -> ThreadpoolController:
    """Find the libraries that are loaded: NumPy's, which computes plans; one that is loaded later is not limited."""
    return ThreadpoolController()


def on_one_core(function: Callable[P, T]) -> Callable[P, T]:
    """Let the BLAS libraries of this process use one thread while `function` runs."""

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        with _libraries().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited
