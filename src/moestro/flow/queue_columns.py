"""The columns of a device's micro-queues, which step policies see as a `QueueTable`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import StageShape
from moestro.core.views import ATTENTION, EMPTY_QUEUE_NS, NUM_CLASSES
from moestro.core.work import Int32s

Int64s = NDArray[np.int64]


class QueueColumns:
    """Counts and ages of all micro-queues of one device.

    Args:
        shape: of the device.

    Attributes:
        n, oldest_ns, num_expert_tokens: as in `QueueTable`.
        num_prefill_tokens: as in `QueueTable`.
        seen: read-only views of `n`, `oldest_ns`, `num_expert_tokens` and `num_prefill_tokens`.
        num_of_slot: int64[slots], pairs that wait in each slot, summed over layers and classes.
        num_waiting: tokens in attention queues and pairs in expert queues.
        num_pairs: pairs in expert queues.
    """

    def __init__(self, shape: StageShape) -> None:
        layers, groups = shape.num_layers + 1, 1 + shape.num_experts
        self.n: Int32s = np.zeros((NUM_CLASSES, layers, groups), np.int32)
        self.oldest_ns: Int64s = np.full((NUM_CLASSES, layers, groups), EMPTY_QUEUE_NS, np.int64)
        self.num_expert_tokens: Int32s = np.zeros((NUM_CLASSES, layers), np.int32)
        self.num_prefill_tokens: Int32s = np.zeros((NUM_CLASSES, layers), np.int32)
        columns = self.n, self.oldest_ns, self.num_expert_tokens, self.num_prefill_tokens
        self.seen = tuple(read_only(each) for each in columns)
        self.num_of_slot: Int64s = np.zeros(shape.num_experts, np.int64)
        self.num_waiting = self.num_pairs = 0

    def set_queue(self, at: tuple[int, int, int], num_tokens: int, oldest_ns: int) -> None:
        """Store one queue's count and age. `at`: class, layer, group."""
        change = num_tokens - int(self.n[at])
        self.num_waiting += change
        if at[2] != ATTENTION:
            self.num_expert_tokens[at[:2]] += change
            self.num_of_slot[at[2] - 1] += change
            self.num_pairs += change
        self.n[at], self.oldest_ns[at] = num_tokens, oldest_ns

    def add_to_queue(self, at: tuple[int, int, int], num_tokens: int, oldest_ns: int) -> None:
        """Add tokens that wait since `oldest_ns` to one queue. `at`: class, layer, group."""
        self.set_queue(at, int(self.n[at]) + num_tokens, min(int(self.oldest_ns[at]), oldest_ns))

    def add_pairs(self, service_class: int, layer: int, sizes: Int64s, oldest_ns: Int64s) -> None:
        """Add pairs to a layer's expert queues.

        Args:
            sizes: int64[slots], pairs of each slot.
            oldest_ns: int64[slots], since when the oldest of them waits; EMPTY_QUEUE_NS where there is none.
        """
        n, oldest = self.n[service_class, layer, 1:], self.oldest_ns[service_class, layer, 1:]
        np.add(n, sizes, out=n, casting="same_kind")
        np.minimum(oldest, oldest_ns, out=oldest)
        self.num_of_slot += sizes
        num_pairs = int(sizes.sum())
        self.num_expert_tokens[service_class, layer] += num_pairs
        self.num_waiting += num_pairs
        self.num_pairs += num_pairs

    def clear_experts(self, service_class: int, layer: int) -> None:
        """No pair of this class waits in this layer any more."""
        num_pairs = int(self.num_expert_tokens[service_class, layer])
        self.num_waiting -= num_pairs
        self.num_pairs -= num_pairs
        self.num_of_slot -= self.n[service_class, layer, 1:]
        self.num_expert_tokens[service_class, layer] = 0
        self.n[service_class, layer, 1:] = 0
        self.oldest_ns[service_class, layer, 1:] = EMPTY_QUEUE_NS


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """View an array without the right to write."""
    seen = array.view()
    seen.flags.writeable = False
    return seen
