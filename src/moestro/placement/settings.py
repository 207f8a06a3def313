"""The settings of expert load. A docstring under a field is its text in `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from moestro.core.setting_checks import CheckedSettings, at_least
from moestro.errors import ConfigError


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
