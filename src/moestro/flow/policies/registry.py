"""Step policies by name, and those of a user's file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from moestro.core.clock import to_ns
from moestro.core.user_code import load_policy
from moestro.core.views import ATTENTION, LS, NOBODY_WAITS_NS, NUM_CLASSES, QueueTable, Run, StepPolicy, Wait
from moestro.errors import ConfigError
from moestro.flow.policies.basic import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption

STEPPING = ("qllm", "in_order")
_FLAG = "--step-policy"


def make_step_policy(text: str, max_be_wait_s: float) -> StepPolicy:
    """The policy that `text` names.

    Args:
        text: a name in STEPPING, or `FILE.py:NAME`: a function or an object that can be called, or a class of such
            objects, which is made without arguments. It is tried once, on a device where one token waits.
        max_be_wait_s: of `qllm`, seconds for which a best-effort unit may be passed over; inf means no limit.

    Raises:
        ConfigError: there is no such policy, or it fails its trial.
    """
    if text == "qllm":
        return ExpertLevelPreemption(max_wait_ns=None if math.isinf(max_be_wait_s) else to_ns(max_be_wait_s))
    if text == "in_order":
        return in_order
    file, _, name = text.partition(":")
    if not file.endswith(".py"):
        raise ConfigError(f"{_FLAG} {text!r} is unknown: give one of {', '.join(STEPPING)}, or FILE.py:NAME")
    return load_policy(_FLAG, Path(file), name, _tried)


def _tried(policy: Any) -> StepPolicy:
    answer = policy(_one_token_waits(), 0)
    is_run = isinstance(answer, Run) and (answer.layer, answer.group) == (0, ATTENTION)
    if not is_run and not isinstance(answer, Wait):
        raise ConfigError(f"it chose {answer!r} where one token waits for the attention of layer 0")
    chosen: StepPolicy = policy
    return chosen


def _one_token_waits() -> QueueTable:
    """One latency-sensitive token before the attention of layer 0, on a device of one layer and two experts."""
    shape = (NUM_CLASSES, 2, 3)
    n, oldest_ns = np.zeros(shape, np.int32), np.full(shape, NOBODY_WAITS_NS, np.int64)
    n[LS, 0, ATTENTION], oldest_ns[LS, 0, ATTENTION] = 1, 0
    passed_ns = np.zeros(shape, np.int64)
    return QueueTable(n, oldest_ns, passed_ns, n > 0, np.zeros(shape[:2], np.int32), 1)
