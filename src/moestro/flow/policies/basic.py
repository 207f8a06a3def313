"""The plain step policy: everything in order, as a forward pass would."""

from __future__ import annotations

import numpy as np

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run
from moestro.flow.registry import STEP_POLICIES

ALL = 2**31 - 1  # more tokens than any device holds


@STEP_POLICIES.register_function(
    "in_order",
    "Each forward pass runs to its end; nothing is preempted.",
    source="Moestro; the baseline and the oracle of the others",
)
def in_order(view: QueueTable, now_ns: int) -> Run:
    """The deepest layer with runnable tokens, whole: one plan runs as a forward pass, and of several the first ends
    first. Nobody is preempted: the baseline of the others, and their oracle.

    Bound: a plan is passed over only by those that came before it.
    """
    layer = int(np.flatnonzero(view.runnable.any(axis=(0, 2)))[-1])
    group = EVERY_EXPERT if view.num_expert_tokens[:, layer].any() else ATTENTION
    return Run(layer, group, ALL, (LS, BE), until=ALL)
