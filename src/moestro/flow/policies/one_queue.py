"""Policies that run one whole micro-queue at a time: most tokens first, first layer first, oldest token first."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import ATTENTION, BE, EMPTY_QUEUE_NS, EVERY_EXPERT, LS, QueueTable, Run, StepFunction, Wait
from moestro.errors import ConfigError
from moestro.flow.registry import STEP_POLICIES

# The baseline step policy: plans run in order, each as one forward pass.

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


PerQueue = NDArray[np.int32]


@dataclass(kw_only=True)
class OneQueue(ABC):
    """Runs the queue that `choose` names, up to a number of tokens.

    Queues have one order: by layer, in a layer the attention first, then the experts by slot. The first of several
    equal queues runs.

    Attributes:
        max_attention_rows: most tokens of one attention, at least 1. Infinity means no limit.
        max_expert_rows: most tokens of one expert batch, at least 1. Infinity means no limit.

    Raises:
        ConfigError: a limit is below 1.
    """

    overlaps_prefill: ClassVar[bool] = False

    max_attention_rows: float = math.inf
    max_expert_rows: float = math.inf

    def __post_init__(self) -> None:
        if not (self.max_attention_rows >= 1 and self.max_expert_rows >= 1):
            raise ConfigError("max_attention_rows and max_expert_rows must be at least 1")

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Run the chosen queue, latency-sensitive tokens first where not all fit."""
        return self.run(self.choose(view), view)

    def run(self, index: int, view: QueueTable) -> Run:
        """Make the `Run` of the queue `index`, counted in the order of queues."""
        layer, group = divmod(index, view.n.shape[2])
        limit = self.max_attention_rows if group == ATTENTION else self.max_expert_rows
        return Run(layer, group, ALL if limit == math.inf else int(limit), (LS, BE))

    @abstractmethod
    def choose(self, view: QueueTable) -> int:
        """Return the index of a runnable queue in the order of queues."""


@STEP_POLICIES.register(
    "mtfs",
    "Runs the queue with the most tokens.",
    source="AMoE, section 3.4, the first strawman",
)
class MostTokensFirst(OneQueue):
    """Runs the queue with the most tokens, so that each weight that is read serves many of them.

    Bound: none. A small queue is passed over as long as larger ones fill up again.

    Source: AMoE, section 3.4. Small rests of a batch stay behind in each layer, so batches get smaller and smaller.
    """

    def choose(self, view: QueueTable) -> int:
        """Return the queue with the most tokens."""
        return int((total(view.n) * can_run(view)).argmax())


@STEP_POLICIES.register(
    "flfs",
    "Runs the queue of the first layer with tokens, so that later tokens wait until all have caught up.",
    source="AMoE, section 3.4, the second strawman",
)
class FirstLayerFirst(OneQueue):
    """Runs the lowest layer with tokens, so that batches merge as much as they can.

    Bound: none. Continuous arrivals keep the deeper layers waiting for ever; AMoE calls this a livelock.

    Source: AMoE, section 3.4 and Fig. 12.
    """

    def choose(self, view: QueueTable) -> int:
        """Return the first queue with tokens."""
        return int(can_run(view).argmax())


@STEP_POLICIES.register(
    "fifo",
    "Runs the queue whose oldest token has waited there longest.",
    source="Moestro; the fairest and the least merged of the baselines",
)
class OldestTokenFirst(OneQueue):
    """Runs the queue with the token that has waited in its queue for the longest time.

    Bound: a token is passed over only by tokens that came to their queues before it, and by those that run with them.
    """

    def __call__(self, view: QueueTable, now_ns: int) -> Run | Wait:
        """Run the queue with the oldest token, the class of this token first."""
        index = self.choose(view)
        run = self.run(index, view)
        ages = view.oldest_ns.reshape(len(view.n), -1)[:, index]
        if len(ages) > 1 and ages[BE] < ages[LS] and view.runnable[BE, run.layer, run.group]:
            return Run(run.layer, run.group, run.max_rows, (BE, LS))
        return run

    def choose(self, view: QueueTable) -> int:
        """Return the queue with the oldest token."""
        return find_oldest(view)[0]


def total(counts: PerQueue) -> PerQueue:
    """Sum a table over its classes, of which it has one or two, [layers, groups]."""
    summed: PerQueue = counts[0] if len(counts) == 1 else counts[LS] + counts[BE]
    return summed


def can_run(view: QueueTable) -> NDArray[np.bool_]:
    """bool[layers, groups], whether tokens of any class can run."""
    runnable = view.runnable
    some: NDArray[np.bool_] = runnable[0] if len(runnable) == 1 else runnable[LS] | runnable[BE]
    return some


def find_oldest(view: QueueTable) -> tuple[int, int]:
    """Return the index of the queue whose oldest token that can run came first, and the time at which it came."""
    since = view.oldest_ns.reshape(len(view.n), -1)
    index = int(_earliest(since).argmin())
    runnable = view.runnable.reshape(since.shape)
    if not any(runnable[each, index] and since[each, index] == since[:, index].min() for each in range(len(since))):
        since = np.where(runnable, since, EMPTY_QUEUE_NS)  # rare: that token lacks a place
        index = int(_earliest(since).argmin())
    return index, int(since[:, index].min())


def _earliest(since: NDArray[np.int64]) -> NDArray[np.int64]:
    first: NDArray[np.int64] = since[0] if len(since) == 1 else np.minimum(since[LS], since[BE])
    return first
