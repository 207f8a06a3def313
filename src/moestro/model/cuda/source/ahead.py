"""Launches ahead: a kernel starts while those before it still run, and waits where it first reads their results.

A kernel that waits takes no time to start when its turn comes, and a product has brought its weights nearer by then.
Every program of every kernel must wait, because a kernel waits for the one before it alone. GPUs from Hopper on can do
this (AHEAD); elsewhere each kernel starts when the one before it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNKS = tl.constexpr(4)  # of a row of weights, so that each thread fetches one


@triton.jit
def wait(AHEAD: tl.constexpr):
    """Let the next kernel start, and wait until all kernels before this one are done."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch(rows, BYTES: tl.constexpr):
    """Bring BYTES bytes, a multiple of 16 * CHUNKS, behind each of some addresses into the second-level cache."""
    PART: tl.constexpr = BYTES // CHUNKS
    at = rows.to(tl.uint64)[:, None] + (tl.arange(0, CHUNKS) * PART)[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [at, tl.full([1, 1], PART, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
