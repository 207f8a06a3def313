"""The part of a network that a worker of a group keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.work import Int32s
from moestro.model.network import Network


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerShare:
    """Share of a network that a worker of a group keeps, and its room for tokens of other workers.

    Attributes:
        worker: number of the worker in the table.
        make_table: function of (layers, experts of a layer) that returns the placement of the experts. A worker
            without experts has none in its row of the table.
        keeps_empty_slots: whether a worker whose slots are all empty keeps them, for experts that come later.
        num_guests: tokens of other workers that may be among this worker's experts at once; 0 where experts are
            exchanged in whole steps.
    """

    worker: int
    make_table: Callable[[int, int], ExpertTable]
    num_guests: int = 0
    keeps_empty_slots: bool = False

    def slots(self, network: Network) -> Int32s:
        """int32[layers, slots], logical expert in each of the worker's slots; EMPTY means none."""
        table = self.make_table(network.num_layers, network.num_experts)
        logical_of: Int32s = table.logical_of[self.worker]
        return logical_of if self.keeps_empty_slots or (logical_of != EMPTY).any() else logical_of[:, :0]

    def cut(self, network: Network, *, keeps_attention: bool = True) -> None:
        """Drop what the worker does not own. The network's linear layers may be packed, its experts may not.

        Args:
            network: a network with all weights.
            keeps_attention: whether the worker keeps everything but the routed experts of others.
        """
        network.keep_experts(self.slots(network))
        if not keeps_attention:
            network.drop_all_but_experts()
        gc.collect()  # modules of transformers may refer to each other
