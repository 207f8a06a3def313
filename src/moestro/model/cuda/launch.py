"""The one place where kernels are launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Grid = tuple[int, ...]

_FIRST_AHEAD = (9, 0)  # compute capability
_ahead = False


def launch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    """Queue a kernel on the current stream of the current device.

    Products and sums stay separate instructions: a compiler would fuse them in one kernel and not in another, and a
    request's bits would depend on which kernel computed it.

    Args:
        kernel: A function of `triton.jit`.
        grid: Number of programs along each axis.
        args: Its arguments in order. Tensors stand for their addresses.
        options: Its compile-time arguments, and `num_warps` and `num_stages`.
    """
    _launcher(kernel, grid, args, {**options, "AHEAD": _ahead})


@contextmanager
def launching_ahead() -> Iterator[None]:
    """Let kernels start before those before them are done, as in `source.ahead`, where the GPU can do this.

    All that is uploaded for them must have been there when the first of them was launched.
    """
    global _ahead  # noqa: PLW0603 the one state of the one place where kernels are launched
    before, _ahead = _ahead, _can_start_ahead()
    try:
        yield
    finally:
        _ahead = before


def _can_start_ahead() -> bool:
    is_compiled = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
    return is_compiled and torch.cuda.get_device_capability() >= _FIRST_AHEAD


def launch_now(kernel: Any, grid: Grid, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel, as `launch` does unless another function replaces it."""
    kernel[grid](*args, enable_fp_fusion=False, **({"launch_pdl": True} if options["AHEAD"] else {}), **options)


Launcher = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
_launcher: Launcher = launch_now


def replace_launcher(launcher: Launcher | None) -> Launcher:
    """Let another function launch kernels, such as one that counts. Returns the one before; None restores the first."""
    global _launcher
    before, _launcher = _launcher, launcher or launch_now
    return before
