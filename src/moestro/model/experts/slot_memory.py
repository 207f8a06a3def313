"""Memory of a worker's experts, whose slots get other experts while the worker serves."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.model.experts.expert_files import read_experts
from moestro.model.experts.expert_slots import write_expert
from moestro.model.experts.routed import ExpertWeights
from moestro.model.network import Network
from moestro.model.settings import ModelSettings


class TorchSlots:
    """Slots of a cut network; implements `worker.expert_loader.SlotMemory`.

    Args:
        network: The network, or the part of it that the worker keeps.
        settings: Those with which it was loaded.
    """

    def __init__(self, network: Network, settings: ModelSettings) -> None:
        self._modules, self._settings = dict(network.experts), settings
        self._device = network.device
        self.expert_bytes = network.bytes_per_expert

    def read(self, layer: int, experts: Sequence[int]) -> list[ExpertWeights | None]:
        """Read experts from the checkpoint. This reads the whole layer once, and takes its memory meanwhile.

        A thread may do so beside the network's steps, which depend on no default of torch: transformers changes torch's
        default dtype for all threads while it builds the layer.

        Returns:
            Weights of each expert. None means that the layer has fewer experts, so that no token visits this one.

        Raises:
            UnsupportedModelError: The checkpoint cannot be loaded, or lacks the layer.
        """
        num_experts = int(self._modules[layer].num_experts)
        present = [expert for expert in experts if expert < num_experts]
        weights = dict(zip(present, read_experts(self._settings, layer, present, self._device), strict=True))
        return [weights.get(expert) for expert in experts]

    def write(self, layer: int, slot: int, expert: int, weights: ExpertWeights | None) -> None:
        """Write weights into a slot that no item in flight uses."""
        if weights is not None:
            write_expert(self._modules[layer], slot, expert, weights)
