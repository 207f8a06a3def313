"""Registers step policies, and makes one from what an operator wrote."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moestro.core.clock import to_ns
from moestro.core.policy_registry import PolicyKind
from moestro.core.views import (
    ATTENTION,
    EMPTY_QUEUE_NS,
    LS,
    NUM_CLASSES,
    QueueTable,
    Run,
    StepFunction,
    StepPolicy,
    Wait,
)
from moestro.errors import ConfigError


def make_step_policy(text: str, max_be_wait_s: float) -> StepPolicy:
    """The policy that an operator named.

    Args:
        text: a name in STEP_POLICIES, with settings if any (`qllm:max_merged=64`), or `FILE.py:NAME`: a function or an
            object that can be called, or a class of such objects, which is made without arguments.
        max_be_wait_s: seconds for which a best-effort unit may be passed over, for policies that have such a bound; inf
            means no limit.

    Raises:
        ConfigError: there is no such policy, or it fails its trial.
    """
    max_wait_ns = None if math.isinf(max_be_wait_s) else to_ns(max_be_wait_s)
    return STEP_POLICIES.make(text, max_wait_ns=max_wait_ns)


def _try_once(policy: StepPolicy) -> None:
    """Choose on a device where one token waits.

    Raises:
        ConfigError: the policy chose what cannot run. What the policy itself raises goes on.
    """
    answer = policy(_one_token_waits(), 0)
    is_run = isinstance(answer, Run) and (answer.layer, answer.group) == (0, ATTENTION)
    if not is_run and not isinstance(answer, Wait):
        raise ConfigError(f"it chose {answer!r} where one token waits for the attention of layer 0")


def _one_token_waits() -> QueueTable:
    """One latency-sensitive token before the attention of layer 0, on a device of one layer and two experts."""
    shape = (NUM_CLASSES, 2, 3)
    n, oldest_ns = np.zeros(shape, np.int32), np.full(shape, EMPTY_QUEUE_NS, np.int64)
    n[LS, 0, ATTENTION], oldest_ns[LS, 0, ATTENTION] = 1, 0
    passed_ns = np.zeros(shape, np.int64)
    none = np.zeros(shape[:2], np.int32)
    return QueueTable(n, oldest_ns, passed_ns, n > 0, none, 1, none)


def _adapt(found: Any, _text: str) -> StepPolicy:
    """Make a step policy of a user's function or object; one that does not say `overlaps_prefill` does not overlap."""
    policy: StepPolicy = found if hasattr(found, "overlaps_prefill") else StepFunction(found)
    return policy


STEP_POLICIES: PolicyKind[StepPolicy] = PolicyKind(
    "step policy",
    "--step-policy",
    "moestro.flow.policies",
    try_once=_try_once,
    adapt=_adapt,
    offered=("max_wait_ns",),
)
