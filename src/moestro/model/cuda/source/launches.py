"""Launches of all kernels: a kernel waits for the one before it, and finds tensors by their addresses.

A kernel that is launched ahead starts while the one before it still runs, and waits where it first reads its results.
It reads the step's inputs and constants before that, so that it has no start to wait for when its turn comes. Every
program of every kernel must wait, because a kernel waits for the one before it alone. GPUs from Hopper on can do this
(AHEAD); elsewhere each kernel starts when the one before it is done.

Weights and pools are found by an address on the device, so that one recorded launch serves several layers. A pointer to
uint64 in place of a tensor stands for the tensor whose address is there: the type alone decides, so that launches with
tensors compile as if there were no addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments of each kernel that may be addresses, and what has the type of the numbers there: an argument, or its name.
FOUND = {
    "add_norm": {"weight": "out_normed"},
    "linear": {"weight": "STORED", "bias": "rows", "scales": "float32"},
    "heads": dict.fromkeys(("q_weight", "k_weight", "keys", "values"), "query"),
    "attend": dict.fromkeys(("keys", "values", "sinks"), "query"),
    "choose": {"bias": "KIND", "correction": "float32"},
    "sort_pairs": {"counts": "int64"},
    "expert_up": {"weights": "int64", "bias": "rows", "scales": "int64", "counts": "int64"},
    "expert_down": {"weights": "int64", "bias": "inner", "scales": "int64"},
}


@triton.jit
def find(place, kind: tl.constexpr):
    """`place`, or numbers of `kind` at the address that is there, a multiple of 16."""
    if place.dtype.element_ty == tl.uint64:
        return tl.multiple_of(tl.load(place).to(tl.pointer_type(kind)), 16)
    else:  # noqa: RET505 - the compiler must not see the type of what it leaves out
        return place


@triton.jit
def wait(AHEAD: tl.constexpr):
    """Wait until all kernels before this one are done, and let the next one start."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
