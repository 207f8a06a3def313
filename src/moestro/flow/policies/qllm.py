"""QLLM's expert-level preemption: latency-sensitive tokens run first at every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run, Wait
from moestro.flow.policies.one_queue import ALL, in_order
from moestro.flow.registry import STEP_POLICIES


@STEP_POLICIES.register(
    "qllm",
    "Latency-sensitive tokens run first at every checkpoint, with at most `max_merged` best-effort tokens beside them.",
    source="QLLM, sections 3.2 and 3.3; merging and ageing are ours",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLevelPreemption:
    """Runs latency-sensitive tokens before best-effort ones wherever both could run.

    Latency-sensitive tokens run in the lowest layer where any wait, so that later ones catch up and join one batch.
    Best-effort tokens of the same queue join them, if these are at most `max_merged`: the cost of a small batch is
    mostly the weights. Merged tokens stay together in the following layers and decode steps. Without latency-sensitive
    tokens, best-effort ones run in the deepest layer first, so that started work ends.

    Bound: a best-effort unit that was passed over for `max_wait_ns` in total runs before everything else until its step
    ends. A unit lives for one step, so a request can wait that long in each of its steps.

    Attributes:
        max_wait_ns: longest time for which a unit is passed over, ns. None means no bound, as in the paper, which
            calls this a limitation (section 6).
        max_merged: most best-effort tokens that join a queue; for experts, most (token, expert) pairs.

    Source: QLLM, arXiv:2503.09304, sections 3.2 and 3.3; the merging rule and the ageing are ours.
    """

    overlaps_prefill: ClassVar[bool] = False

    max_wait_ns: int | None = 1_000_000_000
    max_merged: int = 256

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Choose the tokens that run next."""
        urgent, left_ns = _layers(view, LS), self._left_ns(view)
        if len(urgent) == 0 or (left_ns is not None and left_ns <= 0):
            layers = _layers(view, BE)
            return _run(view, BE, int(layers[-1]), ALL, ALL) if len(layers) else in_order(view, now_ns)
        first = int(urgent[0])
        run = _run(view, LS, first, self.max_merged, self._next_meeting(view, first))
        return run if left_ns is None else replace(run, ask_again_ns=now_ns + left_ns)

    def _next_meeting(self, view: QueueTable, layer: int) -> int:
        """Return the next layer in which urgent tokens of `layer` could join others; ALL if there is none."""
        others = _waiting(view, BE)
        meets = (_waiting(view, LS) > 0) | ((others > 0) & (others <= self.max_merged))
        if meets[layer] and view.num_expert_tokens[:, layer].any():
            return 0  # these tokens can join others among the experts of their own layer
        ahead = meets[layer + 1 :].nonzero()[0]
        return layer + 1 + int(ahead[0]) if len(ahead) else ALL

    def _left_ns(self, view: QueueTable) -> int | None:
        """Return the remaining time for which best effort may be passed over. None means no limit or no best effort."""
        if self.max_wait_ns is None or not np.count_nonzero(view.n[BE]):
            return None
        return self.max_wait_ns - int(view.passed_ns[BE].max())


def _waiting(view: QueueTable, service_class: int) -> NDArray[np.int32]:
    """Count the tokens of a class in each layer, int32[num_layers + 1]."""
    waiting: NDArray[np.int32] = view.num_expert_tokens[service_class] + view.n[service_class, :, ATTENTION]
    return waiting


def _layers(view: QueueTable, service_class: int) -> NDArray[np.intp]:
    """Return the layers in which tokens of a class can run, ascending."""
    attention = view.runnable[service_class, :, ATTENTION]
    can_run: NDArray[np.bool_] = attention | (view.num_expert_tokens[service_class] > 0)
    return can_run.nonzero()[0]


def _run(view: QueueTable, first: int, layer: int, max_others: int, until: int) -> Run:
    """Run tokens of the class `first` in `layer`, and those of the other class if they are at most `max_others`."""
    other = 1 - first
    if view.num_expert_tokens[first, layer]:
        group, counts = EVERY_EXPERT, view.num_expert_tokens[:, layer]
    else:
        group, counts = ATTENTION, view.n[:, layer, ATTENTION]
    if counts[other] > max_others:
        return Run(layer, group, int(counts[first]), (first,), until)
    return Run(layer, group, int(counts.sum()), (first, other), until)
