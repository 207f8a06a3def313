"""Step policies that no one would want: random choices, and choices made to break things."""

from __future__ import annotations

import numpy as np

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run, StepFunction, Wait
from moestro.flow.registry import STEP_POLICIES

ALL = 2**31 - 1


def queues(view: QueueTable) -> list[tuple[int, int]]:
    """(layer, group) of all that can run."""
    return [(int(layer), int(group)) for layer, group in np.argwhere(view.runnable.any(axis=0))]


class Random:
    """Any queue, any share of it, any order of classes; sometimes a wait."""

    overlaps_prefill = False

    def __init__(self, seed: int, waits: bool = True) -> None:
        self.rng, self.waits = np.random.default_rng(seed), waits

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        rng = self.rng
        if self.waits and rng.random() < 0.1:
            return Wait(now_ns + int(rng.integers(1, 50)))
        layer, group = queues(view)[rng.integers(len(queues(view)))]
        if group != ATTENTION and rng.random() < 0.3:
            group = EVERY_EXPERT
        most = int(rng.choice([1, 2, 5, ALL]))
        until = int(rng.choice([0, layer + 1, layer + 2, ALL]))
        return Run(layer, group, most, (LS, BE) if rng.random() < 0.5 else (BE, LS), until)


@StepFunction
def deepest(view: QueueTable, now_ns: int) -> Run:
    """Tears every wave apart: the furthest tokens go on alone, token by token, its last expert first."""
    layer, group = queues(view)[-1]
    return Run(layer, group, 1, (BE, LS))


@StepFunction
def shallowest(view: QueueTable, now_ns: int) -> Run:
    """No token goes on before all are there: parks as many as possible."""
    layer, group = queues(view)[0]
    return Run(layer, group, ALL, (BE, LS))


@StepFunction
def youngest(view: QueueTable, now_ns: int) -> Run:
    """The queue whose tokens came last: nothing parked is ever chosen while there is anything else."""
    oldest = np.where(view.n > 0, view.oldest_ns, -1).max(axis=0)
    layer, group = max(queues(view), key=lambda at: oldest[at])
    return Run(layer, group, 3, (LS, BE))


# Every registered policy, and settings and chains that reach its other branches; times fit tests that count in ns.
STEP_TEXTS = (
    *STEP_POLICIES.names(),
    "defrag:lookback=3,max_attention_rows=5,max_expert_rows=2",
    "urgent:inner=priority+defrag,max_wait=5e-8,max_merged=4",
    "priority:inner=layered_prefill,num_groups=2,tokens_per_group=1",
    "layered_prefill:num_groups=2,tokens_per_group=3",
)
ADVERSARIES = {"deepest": deepest, "shallowest": shallowest, "youngest": youngest}
