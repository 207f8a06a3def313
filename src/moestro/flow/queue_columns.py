"""The columns of a device's micro-queues, which step policies see as a `QueueTable`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import StageShape
from moestro.core.views import ATTENTION, NOBODY_WAITS_NS, NUM_CLASSES
from moestro.core.work import Int32s

Int64s = NDArray[np.int64]


class QueueColumns:
    """Counts and ages of all micro-queues of one device.

    Args:
        shape: of the device.

    Attributes:
        n, oldest_ns, num_expert_tokens: as in `QueueTable`.
        waits: bool, shape of `n`, whether the queue holds tokens.
        num_prefill_tokens: as in `QueueTable`.
        seen: read-only views of `n`, `oldest_ns`, `num_expert_tokens` and `num_prefill_tokens`.
        num_waiting: tokens in attention queues and pairs in expert queues.
    """

    def __init__(self, shape: StageShape) -> None:
        layers, groups = shape.num_layers + 1, 1 + shape.num_experts
        self.n: Int32s = np.zeros((NUM_CLASSES, layers, groups), np.int32)
        self.oldest_ns: Int64s = np.full((NUM_CLASSES, layers, groups), NOBODY_WAITS_NS, np.int64)
        self.waits: NDArray[np.bool_] = np.zeros((NUM_CLASSES, layers, groups), np.bool_)
        self.num_expert_tokens: Int32s = np.zeros((NUM_CLASSES, layers), np.int32)
        self.num_prefill_tokens: Int32s = np.zeros((NUM_CLASSES, layers), np.int32)
        columns = self.n, self.oldest_ns, self.num_expert_tokens, self.num_prefill_tokens
        self.seen = tuple(read_only(each) for each in columns)
        self.num_waiting = 0

    def set_queue(self, at: tuple[int, int, int], num_tokens: int, oldest_ns: int) -> None:
        """Store one queue's count and age. `at`: class, layer, group."""
        change = num_tokens - int(self.n[at])
        self.num_waiting += change
        if at[2] != ATTENTION:
            self.num_expert_tokens[at[:2]] += change
        self.n[at], self.oldest_ns[at], self.waits[at] = num_tokens, oldest_ns, num_tokens > 0

    def add_pairs(self, service_class: int, layer: int, sizes: Int64s, oldest_ns: Int64s) -> None:
        """Add pairs to a layer's expert queues.

        Args:
            sizes: int64[slots], pairs of each slot.
            oldest_ns: int64[slots], since when the oldest of them waits; NOBODY_WAITS_NS where there is none.
        """
        self.n[service_class, layer, 1:] += sizes.astype(np.int32)
        oldest = self.oldest_ns[service_class, layer, 1:]
        np.minimum(oldest, oldest_ns, out=oldest)
        self.waits[service_class, layer, 1:] |= sizes > 0
        num_pairs = int(sizes.sum())
        self.num_expert_tokens[service_class, layer] += num_pairs
        self.num_waiting += num_pairs

    def clear_experts(self, service_class: int, layer: int) -> None:
        """No pair of this class waits in this layer any more."""
        self.num_waiting -= int(self.num_expert_tokens[service_class, layer])
        self.num_expert_tokens[service_class, layer] = 0
        self.n[service_class, layer, 1:] = 0
        self.oldest_ns[service_class, layer, 1:] = NOBODY_WAITS_NS
        self.waits[service_class, layer, 1:] = False


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """View an array without the right to write."""
    seen = array.view()
    seen.flags.writeable = False
    return seen
