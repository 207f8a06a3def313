"""The settings of one rank's token flow. A docstring under a field is its text in `--help`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from moestro.core.setting_checks import CheckedSettings, at_least, between, flag_help
from moestro.core.views import StepPolicy
from moestro.errors import ConfigError
from moestro.flow.registry import STEP_POLICIES, make_step_policy

MAX_WORKERS = 1024  # of each kind in a group
INLINE_LIMIT = 4 << 20  # bytes, up to which inline costs less; bench/micro/links.py sweeps it
NUM_SPARE = 8  # workers with experts that can be added while the group serves

Mode = Literal["fused", "preemptive", "ep", "async"]

_STEP = "In preemptive mode, what runs next; or FILE.py:NAME."


@dataclass(frozen=True, kw_only=True)
class ModeSettings(CheckedSettings):
    """In which pieces one rank computes."""

    mode: Mode = "fused"
    (
        "fused: one forward pass a step. preemptive: a step stops between any two expert batches when a request with"
        ' "service_class": "ls" (the default) arrives, and goes on later; --scheduling-policy qllm --evict-policy'
        " least_computed_be_first puts these first where KV is scarce, too. ep: expert parallelism over --engines N;"
        " each engine has its own requests, attention and KV cache, and one N-th of the experts. They step and restart"
        " together. async: workers with attention and workers with experts (--attention and --experts) are apart, and"
        " each waits only for the tokens that it lacks."
    )


@dataclass(frozen=True, kw_only=True)
class PreemptionSettings(CheckedSettings):
    """Choice of what a rank in `preemptive` mode runs next."""

    step_policy: Annotated[str, flag_help(_STEP, STEP_POLICIES)] = "qllm"
    pass_decodes: bool = False
    (
        'In preemptive mode, "ls" requests pass a step of "be" requests for each of their tokens, not for the first'
        " alone: their answers end sooner, and the throughput falls."
    )
    max_be_wait: Annotated[float, at_least(0, may_be_infinite=True)] = 1.0
    (
        'In preemptive mode, seconds for which "be" requests may stand still in one step while "ls" requests that came'
        " later run; then they run first until the step is over. inf means no limit."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make_step_policy()

    def make_step_policy(self) -> StepPolicy:
        """A new step policy, without any history.

        Raises:
            ConfigError: it is unknown, or a user's file does not hold it.
        """
        return make_step_policy(self.step_policy, self.max_be_wait)


@dataclass(frozen=True, kw_only=True)
class SteppingSettings(PreemptionSettings, ModeSettings):
    """How one rank computes its steps."""


_WITH_ATTENTION = "In async mode, what a worker with attention runs next; or FILE.py:NAME."
_WITH_EXPERTS = "In async mode, what a worker with experts alone runs next; or FILE.py:NAME."


@dataclass(frozen=True, kw_only=True)
class GroupStepSettings(CheckedSettings):
    """Step policies, copies and credits of the workers of a group in `async` mode."""

    attention_step_policy: Annotated[str, flag_help(_WITH_ATTENTION, STEP_POLICIES)] = "priority"
    expert_step_policy: Annotated[str, flag_help(_WITH_EXPERTS, STEP_POLICIES)] = "priority"
    expert_credits: Annotated[int | None, at_least(1)] = None
    (
        "In async mode, tokens of one attention worker that may be at one expert worker at once. Unset: all that it has"
        " in the network."
    )
    inline_limit: Annotated[int | None, at_least(0)] = None
    (
        "In async mode, largest tensor in bytes that goes with its message over ZeroMQ; a larger one follows over NCCL"
        " between two GPUs, else over gloo. Unset: 131072 for NCCL, 4194304 for gloo."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in (self.attention_step_policy, self.expert_step_policy):
            make_step_policy(text, math.inf)


@dataclass(frozen=True, kw_only=True)
class GroupOptions(GroupStepSettings, CheckedSettings):
    """The workers of a group in `async` mode."""

    attention: Annotated[int | None, between(1, MAX_WORKERS)] = None
    "In async mode, workers with attention and KV, which are the engines. Unset: 1."
    experts: Annotated[int | None, between(0, MAX_WORKERS)] = None
    "In async mode, workers with experts alone. 0: the workers with attention hold the experts too. Unset: 1."
    expert_copies: Annotated[int, at_least(1)] = 1
    (
        "In async mode, workers that hold each expert. With 2, the other one takes over when a worker ends, or is"
        " silent for 0.2 s."
    )
    standby: bool = True
    (
        "In async and ep mode, keep processes that have loaded the libraries and fork all workers, which then start in"
        " a second."
    )
    expert_timeout: Annotated[float, at_least(0.3)] = 0.6
    "In async mode, seconds without a sign of life after which a worker with experts alone is killed and restarted."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_copies > self.num_shares:
            raise ConfigError(
                f"--expert-copies {self.expert_copies} needs as many workers with experts, and there are"
                f" {self.num_shares}: raise --experts"
            )

    @property
    def num_homes(self) -> int:
        """Workers with attention."""
        return 1 if self.attention is None else self.attention

    @property
    def num_expert_workers(self) -> int:
        """Workers with experts alone, at the start."""
        return 1 if self.experts is None else self.experts

    @property
    def num_places(self) -> int:
        """Places for workers, some of which workers can take that are added while the group serves."""
        return self.num_homes + self.num_expert_workers + NUM_SPARE

    @property
    def num_shares(self) -> int:
        """Parts into which the experts of a layer are divided: one for each worker that holds experts."""
        return self.num_expert_workers or self.num_homes

    @property
    def first_shares(self) -> tuple[tuple[int, ...], ...]:
        """Shares that the worker of each place holds at the start."""
        return tuple(self.shares_of(worker) for worker in range(self.num_places))

    def shares_of(self, worker: int) -> tuple[int, ...]:
        """Shares that a worker holds at the start: its own, and those of the workers after it for copies."""
        holder = worker if self.num_expert_workers == 0 else worker - self.num_homes
        if not 0 <= holder < self.num_shares:
            return ()
        return tuple((holder + copy) % self.num_shares for copy in range(self.expert_copies))
