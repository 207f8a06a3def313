"""The settings of one rank's token flow. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.core.views import StepPolicy
from moestro.flow.registry import STEP_POLICIES, make_step_policy

Mode = Literal["fused", "preemptive", "ep"]

_STEP = f"In preemptive mode, what runs next; or FILE.py:NAME.\n\n{STEP_POLICIES.help_text()}"


@dataclass(frozen=True, kw_only=True)
class ModeSettings(CheckedSettings):
    """In which pieces one rank computes."""

    mode: Mode = "fused"
    (
        "fused: one forward pass a step. preemptive: a step stops between any two expert batches when a request with"
        ' "service_class": "ls" arrives, and later continues from there; requests that do not say are "ls". With'
        " --scheduling-policy qllm --evict-policy least_computed_be_first they also come first where KV is scarce. ep:"
        " expert parallelism over --engines N: each engine has its own requests, attention and KV cache, and holds one"
        " N-th of the experts, with which it computes for all engines. They step together, and restart together."
    )


@dataclass(frozen=True, kw_only=True)
class PreemptionSettings(CheckedSettings):
    """What a rank in `preemptive` mode runs next."""

    step_policy: Annotated[str, Parameter(help=_STEP)] = "qllm"
    pass_decodes: bool = False
    (
        'In preemptive mode, "ls" requests pass a step of "be" requests for each of their tokens, not for the first'
        " alone: their answers end sooner, in small batches, at the cost of all others and of the throughput."
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
