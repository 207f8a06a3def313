"""Registers step policies, and makes one from what an operator wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moestro.core.clock import to_ns
from moestro.core.policy_registry import PolicyKind, errors_of
from moestro.core.views import (
    ATTENTION,
    EMPTY_QUEUE_NS,
    EVERY_EXPERT,
    LS,
    NUM_CLASSES,
    QueueTable,
    Run,
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


@dataclass(frozen=True, slots=True)
class UserStep:
    """The step policy of a user's file: a function, or an object that can be called.

    Attributes:
        choose: (view, now_ns) -> what runs next.
        name: flag and text that name the policy, for messages.
    """

    choose: Callable[[QueueTable, int], Run | Wait]
    name: str

    @property
    def overlaps_prefill(self) -> bool:
        """Attribute of that name of the object; a function has none and does not overlap."""
        return bool(getattr(self.choose, "overlaps_prefill", False))

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Choose what runs next. The policy's errors, and an answer that names no queue, are ConfigErrors."""
        with errors_of(self.name):
            answer = self.choose(view, now_ns)
            if isinstance(answer, Wait):
                if answer.until_ns <= now_ns:  # It would choose again at once, for ever.
                    raise ConfigError(f"it answered {answer!r} at {now_ns} ns: a Wait until later is wanted")
            elif not _names_queue(answer, view):
                raise ConfigError(
                    f"it answered {answer!r}: a Wait, or a Run of the view's layers and groups, is wanted"
                )
        return answer


def _names_queue(answer: Any, view: QueueTable) -> bool:
    """Return whether an answer is a `Run` of a layer and group that the view has."""
    if not isinstance(answer, Run) or not all(isinstance(n, int | np.integer) for n in (answer.layer, answer.group)):
        return False
    _, num_layers, num_groups = view.n.shape
    return bool(0 <= answer.layer < num_layers and EVERY_EXPERT <= answer.group < num_groups)


def _adapt(found: Any, text: str) -> StepPolicy:
    return UserStep(found, f"{STEP_POLICIES.flag} {text}")


STEP_POLICIES: PolicyKind[StepPolicy] = PolicyKind(
    "step policy",
    "--step-policy",
    "moestro.flow.policies",
    try_once=_try_once,
    adapt=_adapt,
    offered=("max_wait_ns",),
)
