"""Moestro's placement as a policy class of vLLM's expert-parallel load balancer, under its hooks of today and after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.eplb import policy as eplb
from vllm.distributed.eplb.eplb_state import EplbState

from moestro.placement.hosted import HostLoad, HostSizes
from moestro_vllm.interface import EPLB_ARGUMENTS, EPLB_KEY
from moestro_vllm.rebalancing import Rebalancing, StartFile
from moestro_vllm.stall_alarm import StallAlarm

_MARK = "is_moestro"  # attribute of what `install` has put in the place of vLLM's


def install(rebalancing: Rebalancing) -> None:
    """Put the policy, the start file and the alarm in the place of vLLM's; a second call changes nothing."""
    if hasattr(eplb.EPLB_POLICIES[EPLB_KEY], _MARK):
        return
    eplb.EPLB_POLICIES[EPLB_KEY] = policy_class(rebalancing, eplb.EPLB_POLICIES[EPLB_KEY])
    EplbState.step = _watched(EplbState.step, rebalancing.alarm)
    if rebalancing.start is not None:
        own = EplbState.build_initial_global_physical_to_logical_map
        EplbState.build_initial_global_physical_to_logical_map = staticmethod(_started(own, rebalancing.start))


def policy_class(rebalancing: Rebalancing, own: type[Any]) -> type[eplb.AbstractEplbPolicy]:
    """Return a class for `EPLB_POLICIES`.

    Args:
        rebalancing: Places the experts.
        own: vLLM's policy, for what Moestro does not place.
    """

    class MoestroEplbPolicy(eplb.AbstractEplbPolicy):
        """Asks one of Moestro's placement policies."""

        is_moestro = True

        @classmethod
        def rebalance_experts(cls, weight: Any, *sizes: Any, **named: Any) -> Any:
            """Return int64[layers, num_replicas] on the CPU, the expert in each slot.

            Args:
                weight: [layers, experts], tokens of vLLM's window; or a context, as proposed in vLLM's pull request
                    49700, whose answer is a plan.
                sizes: num_replicas, num_groups, num_nodes, num_ranks as in `HostSizes`; [layers, slots], the expert in
                    each slot now; after a context, the policy's state.
                named: Those of the sizes that come by name.
            """
            if hasattr(weight, "load_window_cpu"):
                return _plan(rebalancing, weight)
            sizes += tuple(named[name] for name in EPLB_ARGUMENTS[1 + len(sizes) :] if name in named)
            old = sizes[4] if len(sizes) > 4 else None
            placed = rebalancing.place(
                HostLoad.of_sum(weight.double().cpu().numpy(), rebalancing.window_size),
                HostSizes(*sizes[:4]),
                None if old is None else old.cpu().numpy(),
                lambda: own.rebalance_experts(weight, *sizes).cpu().numpy(),
            )
            return torch.from_numpy(placed)

        def plan_rebalance(self, context: Any, *_policy_state: Any) -> Any:
            """Return the plan of a context, as proposed in vLLM's pull request 49700."""
            return _plan(rebalancing, context)

    return MoestroEplbPolicy


def _plan(rebalancing: Rebalancing, context: Any) -> Any:
    """Return an `EplbPlan`. The context has the tokens of each step, so that their variance is measured."""
    topology, present = context.topology, context.physical_to_logical_map_cpu
    sizes = HostSizes(context.num_replicas, topology.num_groups, topology.num_nodes, topology.num_ranks)
    load = HostLoad.of_steps(context.load_window_cpu.numpy())
    placed = rebalancing.place(load, sizes, present.numpy(), lambda: present.numpy().copy())
    return eplb.EplbPlan(torch.from_numpy(placed.astype("int64")))


def _started(own: Callable[[int, int], Sequence[int]], start: StartFile) -> Callable[[int, int], Sequence[int]]:
    """Return vLLM's function of the first placement, with the start file where its layers are alike."""

    @functools.wraps(own)
    def build(num_routed_experts: int, num_redundant_experts: int) -> Sequence[int]:
        row = start.shared_row(num_routed_experts, num_redundant_experts)
        return own(num_routed_experts, num_redundant_experts) if row is None else row

    return build


def _watched(step: Callable[..., None], alarm: StallAlarm) -> Callable[..., None]:
    """Return vLLM's step of the balancer, with the alarm after it."""

    @functools.wraps(step)
    def watched(state: Any, *args: Any, **kwargs: Any) -> None:
        step(state, *args, **kwargs)
        try:
            worker = state.async_worker
            is_moving = any(model.rebalanced for model in state.model_states.values())
        except AttributeError as error:  # an alarm is no reason to end the engine
            alarm.give_up(f"this vLLM does not show whether experts move: {error}")
            return
        alarm.observe(is_moving=is_moving, is_worker_gone=worker is not None and not worker.is_alive())

    return watched
