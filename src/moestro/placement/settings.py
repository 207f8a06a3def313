"""The settings of expert load and of live placement. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from moestro.core.setting_checks import CheckedSettings, at_least, between, flag_help
from moestro.cost.gpus import GPUS, gpu_named
from moestro.cost.links import INFINIBAND_HDR, LINKS, link_named
from moestro.errors import ConfigError
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits, PlacePolicy
from moestro.placement.payback import LastingPlans, LastingSettings


@dataclass(frozen=True, kw_only=True)
class ExpertLoadSettings(CheckedSettings):
    """How an engine remembers which experts its tokens visited."""

    # vLLM's window and SGLang's between two placements have 1000 steps too (window_size,
    # eplb_rebalance_num_iterations).
    expert_load_half_life: Annotated[float, at_least(0)] = 1000.0
    "Steps after which a step counts half in /admin/experts. 0: all steps since the last reset count alike."

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.expert_load_half_life < 1:
            raise ConfigError(f"--expert-load-half-life {self.expert_load_half_life:g} must be 0, or 1 step at least")


NO_POLICY = "none"
_POLICY = (
    f"In ep and async mode, what plans the placement of experts while the server runs; {NO_POLICY} plans only when"
    " operators ask. NAME or NAME:SETTING=VALUE,...; or FILE.py:NAME."
)


@dataclass(frozen=True, kw_only=True)
class LivePlacementSettings(CheckedSettings):
    """When a running server moves experts, where to, and how fast."""

    placement_policy: Annotated[str, flag_help(_POLICY, PLACE_POLICIES)] = NO_POLICY
    # vLLM's step_interval (EPLBConfig) is 3000, and Gimbal keeps it; SGLang's eplb_rebalance_num_iterations is 1000.
    placement_interval: Annotated[int, at_least(0)] = 3000
    "Steps of the group after which the policy plans again. 0: never by steps. The load is read every 2 s."
    placement_drift: Annotated[float, between(0, 1)] = 0.0
    (
        "Fall of the observed balance (mean load over largest load, mean of all layers) below that of the last plan, at"
        " which the policy plans at once; 0.05 is a first guess. 0: never by drift."
    )
    placement_payback_horizon: Annotated[float | None, at_least(0)] = None
    (
        "Steps within which a move must pay for itself by the traffic model; a plan that does not is dropped. 0: no"
        f" such gate, as in vLLM and SGLang. Unset: {PlaceLimits().horizon_steps:g}, and 0 for gimbal_v1, whose paper"
        " has none."
    )
    placement_least_saving: Annotated[float, between(0, 1)] = LastingSettings().least_share
    (
        "Part of a step, as measured or as priced, that a plan must be expected to save, by what windows found that"
        " earlier plans had not seen. 0: the server follows each plan that pays, without a memory."
    )
    # 64 MiB pass a link of 50 GB/s (400 Gbit/s) in 1.3 ms, about 5 % of a decode step of 25 ms. Not swept.
    placement_max_bytes_per_step: Annotated[int, at_least(1)] = 64 << 20
    "Bytes of weights that a worker sends or takes in between two steps at most; one expert is the least."
    init_expert_location: Path | None = None
    (
        "File of moestro place --out or --sglang: the placement to which the experts move as soon as the server has"
        " started."
    )
    placement_gpu: Annotated[
        str | None,
        flag_help(f"GPU whose prices plans use: one of {', '.join(GPUS)}. Unset: that of --device, or h100."),
    ] = None
    placement_link: Annotated[
        str | None,
        flag_help(
            "Link between the GPUs whose prices plans use. Unset: --paced-link of a paced device, else the GPU's"
            f" NVSwitch; one of {', '.join(LINKS)}."
        ),
    ] = None
    placement_link_across: Annotated[
        str,
        flag_help(f"Link between machines whose prices plans use with --launcher ray; one of {', '.join(LINKS)}."),
    ] = INFINIBAND_HDR.name

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plans_by_itself:
            PLACE_POLICIES.make(self.placement_policy)
        if self.placement_gpu is not None:
            gpu_named(self.placement_gpu)
        if self.placement_link is not None:
            link_named(self.placement_link)
        link_named(self.placement_link_across)

    @property
    def plans_by_itself(self) -> bool:
        """Whether a policy plans without an operator."""
        return self.placement_policy != NO_POLICY

    @cached_property
    def payback_horizon(self) -> float:
        """Steps within which a move must pay for itself; 0 means no such gate."""
        if self.placement_payback_horizon is not None:
            return self.placement_payback_horizon
        return PlaceLimits().horizon_steps if has_payback_gate(self.placement_policy) else 0.0

    @property
    def limits(self) -> PlaceLimits:
        """Limits as policies read them."""
        return PlaceLimits(horizon_steps=self.payback_horizon or _NO_GATE_STEPS)

    def lasting(self, policy: PlacePolicy) -> PlacePolicy:
        """Return the policy of one group, with the memory that it and the settings ask for."""
        policy = getattr(policy, "for_group", lambda: policy)()
        if not self.payback_horizon or not self.placement_least_saving:
            return policy
        return LastingPlans(policy, LastingSettings(least_share=self.placement_least_saving))

    def _made(self) -> PlacePolicy:
        return PLACE_POLICIES.make(self.placement_policy)

    def check_mode(self, mode: str) -> None:
        """Refuse flags of live placement in a mode without experts to move, or that counts too little for the policy.

        Raises:
            ConfigError: The mode has one copy of all experts in each engine, or counts no pairs of experts.
        """
        if mode in ("ep", "async"):
            if mode == "async" and self.plans_by_itself and getattr(self._made(), "needs_pairs", False):
                raise ConfigError(
                    f"--placement-policy {self.placement_policy} needs pairs of experts that tokens visit in"
                    " neighbouring layers, and --mode async counts none: give --mode ep, or another policy"
                )
            return
        given = "--placement-policy" if self.plans_by_itself else "--init-expert-location"
        if self.plans_by_itself or self.init_expert_location is not None:
            raise ConfigError(
                f"{given} moves experts between workers, and in --mode {mode} each engine has all of them: give --mode"
                f" ep or async, or leave {given} out"
            )


def has_payback_gate(policy: str) -> bool:
    """Return whether plans of a policy have to pay for their moves, unless a setting says otherwise."""
    return policy == NO_POLICY or bool(getattr(PLACE_POLICIES.make(policy), "has_payback_gate", True))


# Policies with a gate of their own then see savings that last for longer than any server runs.
_NO_GATE_STEPS = 1e9
