"""All micro-queues of one device, as step policies see them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.stages import StageShape
from moestro.core.views import ATTENTION, EMPTY_QUEUE_NS, NUM_CLASSES, QueueTable
from moestro.core.work import Units
from moestro.flow.attention_queues import AttentionQueues
from moestro.flow.expert_queues import ExpertQueues
from moestro.flow.guests import Guests
from moestro.flow.queue_columns import QueueColumns, read_only
from moestro.flow.token_pool import TokenPool

Int64s = NDArray[np.int64]


class MicroQueues:
    """The queues of one device: before each layer's attention, and before each of its experts.

    Args:
        shape: of the device.
        pool: the device's own tokens.
        guests: tokens of other homes.

    Attributes:
        attention, experts: the queues.
    """

    def __init__(self, shape: StageShape, pool: TokenPool, guests: Guests) -> None:
        self._columns, self._alone = QueueColumns(shape), QueueColumns(shape)
        self._pool, self._guests = pool, guests
        self.attention = AttentionQueues(self._columns, shape.is_sparse, pool)
        self.experts = ExpertQueues(self._columns, shape.num_layers, shape.num_experts)
        self._none_passed = read_only(np.zeros_like(self._columns.oldest_ns))

    @property
    def num_waiting(self) -> int:
        """Tokens that wait for an attention, and pairs that wait for an expert."""
        return self._columns.num_waiting

    @property
    def num_pairs(self) -> int:
        """Pairs that wait for an expert."""
        return self._columns.num_pairs

    def num_waiting_in(self, layer: int, slot: int) -> int:
        """Pairs that wait in one slot of a layer."""
        return int(self._columns.n[:, layer, 1 + slot].sum())

    def depths(self) -> tuple[int, ...]:
        """Pairs that wait in each slot, summed over all layers and classes."""
        return tuple(self._columns.num_of_slot.tolist())

    def waiting_by_layer(self, now_ns: int) -> tuple[Int64s, Int64s]:
        """Count what waits before each layer, whose last is the sampler, and say for how long the oldest waits.

        Returns:
            int64[num_layers + 1] tokens of an attention and pairs of experts, and int64[num_layers + 1] ns.
        """
        num_waiting = self._columns.n.sum(axis=(0, 2), dtype=np.int64)
        oldest_ns = self._columns.oldest_ns.min(axis=(0, 2))
        return num_waiting, np.where(num_waiting > 0, np.maximum(now_ns - oldest_ns, 0), 0)

    def table(self) -> QueueTable:
        """What a step policy sees; it must not keep it."""
        columns = self._columns
        runnable = columns.n > 0
        if self._pool.num_units and columns.num_waiting > self._pool.num_free_places:
            self._leave_out_crowded_attention(runnable)
        passed_ns = self._none_passed
        if self._pool.num_passed or self._guests.num_passed:
            passed_ns = read_only(self._longest_passed_ns())
        return self._make_table(columns, runnable, passed_ns)

    def table_alone(self, units: Units, came_ns: int) -> QueueTable:
        """Make the table of `units` that came at `came_ns`, with nothing else on the device."""
        columns, sizes = self._alone, units.num_tokens
        num_tokens = np.bincount(units.service_class, sizes, NUM_CLASSES).tolist()
        columns.num_prefill_tokens[:, 0] = np.bincount(units.service_class, sizes * (sizes > 1), NUM_CLASSES)
        for service_class, num in enumerate(num_tokens):
            columns.set_queue((service_class, 0, ATTENTION), int(num), came_ns if num else EMPTY_QUEUE_NS)
        return self._make_table(columns, columns.n > 0, self._none_passed)

    def _make_table(self, columns: QueueColumns, runnable: NDArray[np.bool_], passed_ns: Int64s) -> QueueTable:
        n, oldest_ns, num_expert_tokens, num_prefill_tokens = columns.seen
        return QueueTable(
            n=n,
            oldest_ns=oldest_ns,
            passed_ns=passed_ns,
            runnable=runnable,
            num_expert_tokens=num_expert_tokens,
            num_free_places=self._pool.num_free_places,
            num_prefill_tokens=num_prefill_tokens,
        )

    def _leave_out_crowded_attention(self, runnable: NDArray[np.bool_]) -> None:
        """Take the attention queues that have places for none of their units out of `runnable`."""
        for service_class in range(NUM_CLASSES):
            runnable[service_class, self.attention.layers_short_of_places(service_class), ATTENTION] = False

    def _longest_passed_ns(self) -> Int64s:
        """Make `QueueTable.passed_ns`. It is made for each table, because it is wanted only while units are parked."""
        longest = np.zeros_like(self._columns.oldest_ns)
        self.attention.longest_passed_ns(longest)
        self.experts.longest_passed_ns(longest)
        return longest
