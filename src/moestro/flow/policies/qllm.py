"""QLLM's expert-level preemption: latency-sensitive tokens first, at every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, QueueTable, Run, Wait
from moestro.flow.policies.basic import ALL, in_order
from moestro.flow.registry import STEP_POLICIES


@STEP_POLICIES.register(
    "qllm",
    "Latency-sensitive tokens run first at every checkpoint, with at most `max_merged` best-effort tokens beside them.",
    source="QLLM, sections 3.2 and 3.3; merging and ageing are ours",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLevelPreemption:
    """Latency-sensitive tokens run before best-effort ones, wherever both could run.

    They run in the lowest layer where any waits, so that newcomers catch up with those before them and go on as one
    batch. Best-effort tokens of the same queue run with them, if these are at most `max_merged` (of an attention:
    tokens, of experts: pairs of token and expert): what a small batch costs is mostly weights, and who has merged goes
    on, and is decoded, together. Best-effort tokens alone run in the deepest layer first: what was begun ends.

    Bound: a best-effort unit that was passed over for `max_wait_ns` in all is served before everything else until it is
    through. A unit lives for one step, so a request may lose that much in each of its steps. None means no bound, as in
    the paper (section 6 calls it a limitation).

    Source: QLLM, arXiv:2503.09304, sections 3.2 and 3.3; the merging rule and the ageing are ours.
    """

    max_wait_ns: int | None = 1_000_000_000
    max_merged: int = 256

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """What runs next."""
        urgent, left_ns = _layers(view, LS), self._left_ns(view)
        if len(urgent) == 0 or (left_ns is not None and left_ns <= 0):
            layers = _layers(view, BE)
            return _run(view, BE, int(layers[-1]), ALL, ALL) if len(layers) else in_order(view, now_ns)
        first = int(urgent[0])
        run = _run(view, LS, first, self.max_merged, self._next_meeting(view, first))
        return run if left_ns is None else replace(run, ask_again_ns=now_ns + left_ns)

    def _next_meeting(self, view: QueueTable, layer: int) -> int:
        """The layer up to which urgent tokens from `layer` on meet nobody with whom they might go on together."""
        others = _waiting(view, BE)
        meets = (_waiting(view, LS) > 0) | ((others > 0) & (others <= self.max_merged))
        if meets[layer] and view.num_expert_tokens[:, layer].any():
            return 0  # among this layer's experts
        ahead = np.flatnonzero(meets[layer + 1 :])
        return layer + 1 + int(ahead[0]) if len(ahead) else ALL

    def _left_ns(self, view: QueueTable) -> int | None:
        """For how much longer best effort may be passed over; None means no limit, or no best effort."""
        if self.max_wait_ns is None or not np.count_nonzero(view.n[BE]):
            return None
        return self.max_wait_ns - int(view.passed_ns[BE].max())


def _waiting(view: QueueTable, service_class: int) -> NDArray[np.int32]:
    """int32[num_layers + 1], tokens of a class in each layer."""
    waiting: NDArray[np.int32] = view.num_expert_tokens[service_class] + view.n[service_class, :, ATTENTION]
    return waiting


def _layers(view: QueueTable, service_class: int) -> NDArray[np.intp]:
    """Layers where tokens of a class can run, ascending."""
    attention = view.runnable[service_class, :, ATTENTION]
    return np.flatnonzero(attention | (view.num_expert_tokens[service_class] > 0))


def _run(view: QueueTable, first: int, layer: int, max_others: int, until: int) -> Run:
    """Tokens of the class `first` in `layer`, and those of the other class if they are at most `max_others`."""
    other = 1 - first
    if view.num_expert_tokens[first, layer]:
        group, counts = EVERY_EXPERT, view.num_expert_tokens[:, layer]
    else:
        group, counts = ATTENTION, view.n[:, layer, ATTENTION]
    if counts[other] > max_others:
        return Run(layer, group, int(counts[first]), (first,), until)
    return Run(layer, group, int(counts.sum()), (first, other), until)
