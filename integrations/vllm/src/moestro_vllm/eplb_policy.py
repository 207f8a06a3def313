"""Moestro's placement as a policy class of vLLM's expert-parallel load balancer."""

from __future__ import annotations

import torch
from vllm.distributed.eplb.policy import AbstractEplbPolicy

from moestro_vllm.placement import Fleet, Planner


def policy_class(planner: Planner) -> type[AbstractEplbPolicy]:
    """Return a class for `EPLB_POLICIES` that asks `planner`; vLLM never makes an object of it."""

    class MoestroEplbPolicy(AbstractEplbPolicy):
        """Asks one of Moestro's placement policies."""

        @classmethod
        def rebalance_experts(
            cls,
            weight: torch.Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Return int64[layers, num_replicas] on the CPU, the expert in each slot.

            Args:
                weight: [layers, experts], tokens of vLLM's window, of any type and on any device.
                num_replicas, num_groups, num_nodes, num_ranks: Sizes, as in `Fleet`.
                old_global_expert_indices: [layers, slots], the expert in each slot now.
            """
            fleet = Fleet(num_replicas, num_groups, num_nodes, num_ranks)
            old = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
            return torch.from_numpy(planner.place(weight.double().cpu().numpy(), fleet, old))

    return MoestroEplbPolicy
