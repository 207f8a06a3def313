"""The baseline step policy: plans run in order, each as one forward pass."""

from __future__ import annotations

import numpy as np

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run, StepFunction
from moestro.flow.registry import STEP_POLICIES

ALL = 2**31 - 1  # no limit: more tokens than any device holds


@STEP_POLICIES.register_function(
    "in_order",
    "Each forward pass runs to its end; nothing is preempted.",
    source="Moestro; the baseline and the oracle of the others",
)
@StepFunction
def in_order(view: QueueTable, now_ns: int) -> Run:
    """Run all tokens of the deepest layer with runnable ones, so that each plan runs as one forward pass.

    Nothing is preempted: of several plans, the one that began first ends first. Tests of other policies use this one as
    the oracle.

    Bound: only earlier plans pass a plan.
    """
    layer = int(np.flatnonzero(view.runnable.any(axis=(0, 2)))[-1])
    group = EVERY_EXPERT if view.num_expert_tokens[:, layer].any() else ATTENTION
    return Run(layer, group, ALL, (LS, BE), until=ALL)
