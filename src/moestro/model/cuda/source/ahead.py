"""Launches ahead: a kernel starts while the one before it still runs, and waits where it first reads its results.

What it needs besides them, the step's inputs and constants, is read before that, so that it has no start to wait for
when its turn comes. Every program of every kernel must wait, because a kernel waits for the one before it alone. GPUs
from Hopper on can do this (AHEAD); elsewhere each kernel starts when the one before it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait(AHEAD: tl.constexpr):
    """Wait until all kernels before this one are done, and let the next one start."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
