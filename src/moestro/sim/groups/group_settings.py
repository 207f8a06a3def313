"""Settings of simulated groups of workers: the table `[group]` of a file, and the keys of a policy in these modes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from moestro.core.setting_checks import MAX_SETTING, CheckedSettings, at_least, between, name_of
from moestro.cost.links import link_named
from moestro.errors import ConfigError
from moestro.flow.registry import make_step_policy
from moestro.placement.contract import PLACE_POLICIES
from moestro.placement.settings import has_payback_gate

SimMode = Literal["fused", "preemptive", "ep", "ep-overlap", "afd", "async"]
GROUP_MODES: tuple[SimMode, ...] = ("ep", "ep-overlap", "afd", "async")


@dataclass(frozen=True, kw_only=True)
class GroupSettings(CheckedSettings):
    """The workers of each group, and the links between them, in the modes `ep`, `ep-overlap`, `afd` and `async`.

    Attributes:
        num_workers: GPUs of a group.
        workers_per_machine: workers of a machine; consecutive ones are together. Workers with attention and workers
            with experts alone are spread over all machines alike.
        link_within, link_across: links inside a machine and between machines, by their names in `cost.links`.
        two_phase: whether a message of `async` is announced before it is sent, as in AMoE.
        slowdown: factor on the stage times of each worker, from worker 0 on; 1 for the remaining workers.
        jitter: standard deviation of a factor with mean 1 on the time of each stage.
    """

    PLACE: ClassVar[str | None] = "[group] "

    num_workers: Annotated[int, at_least(1)]
    workers_per_machine: Annotated[int, at_least(1)] = 8
    link_within: str = "nvswitch-a100"
    link_across: str = "infiniband-hdr"
    two_phase: bool = True
    slowdown: tuple[float, ...] = ()
    jitter: Annotated[float, at_least(0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("link_within", "link_across"):
            try:
                link_named(getattr(self, name))
            except ConfigError as error:
                raise ConfigError(f"{name_of(self, name)}: {error}") from None
        for factor in self.slowdown:
            if not abs(factor) <= MAX_SETTING:
                raise ConfigError(f"[group] slowdown must be a number up to {MAX_SETTING:g}, got {factor:g}")
        if len(self.slowdown) > self.num_workers or not all(factor > 0 for factor in self.slowdown):
            raise ConfigError(
                f"[group] slowdown must hold at most one factor above 0 for each of the {self.num_workers} workers,"
                f" got {list(self.slowdown)}"
            )

    @property
    def machine_of(self) -> tuple[int, ...]:
        """Machine of each worker."""
        return tuple(worker // self.workers_per_machine for worker in range(self.num_workers))


@dataclass(frozen=True, kw_only=True)
class GroupModeSettings(CheckedSettings):
    """What one of the policies to compare makes of a group.

    Attributes:
        mode: `fused` or `preemptive`: each engine computes alone. `ep`: all workers of a group share the experts and
            step together. `ep-overlap`: the same with two-batch overlap. `afd`: experts on workers of their own, and
            micro-batches in ping-pong. `async`: no worker waits for another one but for the tokens that it lacks.
        num_expert_workers: workers that have experts alone, in `afd` and `async`; the others have attention. 0 puts
            attention and experts on every worker.
        attention_step_policy, expert_step_policy: step policies of `async`; the first is also for workers with both.
        num_credits: tokens of one attention worker that may be at one expert worker at once, in `async`; unset: no
            bound.
        launch_ahead: items that a device holds at once, in `async`; with 2, the host prepares one while another runs.
        stall_share: share of a step for which the workers stall at least, in `ep`, as published for a real system.
        free_links: whether messages and collectives take no time, as in ideal `ep`.
        place: placement policy that plans anew while the group serves, in `ep` and `ep-overlap`.
        place_interval_steps: steps between two plans; the first one comes after a quarter of them, as in vLLM.
        place_drift: fall of the observed balance below that of the last plan, at which the policy plans at once, as
            --placement-drift; 0: never by drift.
        place_payback_steps: steps within which a plan must pay for itself, as --placement-payback-horizon; unset:
            `place_interval_steps`, and 0 for gimbal_v1; 0: no such gate, as in vLLM and SGLang.
        place_bytes_per_step: bytes of weights that a worker sends or receives between two steps, one expert at least;
            unset: one step waits for all.
        num_spare_slots: expert slots of each worker and layer beyond its share, in `ep` and `ep-overlap`.
    """

    mode: SimMode = "fused"
    num_expert_workers: Annotated[int, at_least(0)] = 0
    attention_step_policy: str = "defrag"
    expert_step_policy: str = "defrag"
    num_credits: Annotated[int | None, at_least(1)] = None
    launch_ahead: Annotated[int, at_least(1)] = 1
    stall_share: Annotated[float | None, at_least(0)] = None
    free_links: bool = False
    place: str = "static"
    place_interval_steps: Annotated[int, at_least(4)] = 3000
    place_drift: Annotated[float, between(0, 1)] = 0.0
    place_payback_steps: Annotated[float | None, at_least(0)] = None
    place_bytes_per_step: Annotated[int | None, at_least(1)] = None
    num_spare_slots: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_expert_workers and self.mode not in {"afd", "async"}:
            raise ConfigError(
                f"{name_of(self, 'num_expert_workers')} {self.num_expert_workers} goes with mode 'afd' or 'async', not"
                f" with {self.mode!r}"
            )
        if self.mode == "afd" and not self.num_expert_workers:
            raise ConfigError(f"{name_of(self, 'mode')} = 'afd' needs num_expert_workers of at least 1")
        if self.stall_share is not None and (self.mode != "ep" or self.stall_share >= 1):
            raise ConfigError(
                f"{name_of(self, 'stall_share')} goes with mode 'ep' and is below 1, got {self.stall_share:g} with"
                f" {self.mode!r}"
            )
        self._check_placement()
        for text in (self.attention_step_policy, self.expert_step_policy):
            make_step_policy(text, math.inf)

    def _check_placement(self) -> None:
        if self.place == "static" and not self.num_spare_slots:
            return
        if self.mode not in {"ep", "ep-overlap"}:
            name = "place" if self.place != "static" else "num_spare_slots"
            raise ConfigError(f"{name_of(self, name)} goes with mode 'ep' or 'ep-overlap', not with {self.mode!r}")
        PLACE_POLICIES.make(self.place)

    @property
    def payback_horizon_steps(self) -> float:
        """Steps within which a plan must pay for itself; 0 means no such gate."""
        if self.place_payback_steps is not None:
            return self.place_payback_steps
        return self.place_interval_steps if has_payback_gate(self.place) else 0

    @property
    def plans_placement(self) -> bool:
        """Whether the group plans its placement while it serves."""
        return self.place != "static"

    @property
    def has_group(self) -> bool:
        """Whether the mode needs a group of workers."""
        return self.mode in GROUP_MODES

    def num_attention_workers(self, group: GroupSettings) -> int:
        """Workers of `group` that compute attention.

        Raises:
            ConfigError: none is left.
        """
        left = group.num_workers - self.num_expert_workers
        if left < 1:
            raise ConfigError(
                f"{name_of(self, 'num_expert_workers')} {self.num_expert_workers} leaves none of the"
                f" {group.num_workers} workers of [group] for attention"
            )
        return left
