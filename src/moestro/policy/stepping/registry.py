"""Step policies by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from moestro.core.clock import to_ns
from moestro.core.views import QueueTable, Run, Wait
from moestro.policy.stepping.basic import in_order
from moestro.policy.stepping.qllm import ExpertLevelPreemption

StepPolicyName = Literal["qllm", "in_order"]


def make_step_policy(name: StepPolicyName, max_be_wait_s: float) -> Callable[[QueueTable, int], Run | Wait]:
    """`qllm`: urgent first; `in_order`: nobody is preempted.

    Args:
        max_be_wait_s: for which a step of best-effort requests may be passed over; inf: for ever.
    """
    if name == "in_order":
        return in_order
    return ExpertLevelPreemption(max_wait_ns=None if math.isinf(max_be_wait_s) else to_ns(max_be_wait_s))
