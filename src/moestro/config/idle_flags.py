"""Flags that have no effect under the other settings: tables declare them, and one warning at the start names them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moestro.config.config_sources import settings_in
from moestro.config.linux_process import has_gpu
from moestro.config.serve_settings import ServeSettings
from moestro.core.setting_checks import flag_of

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class Need(Generic[Settings]):
    """A condition without which some flags have no effect.

    Attributes:
        text: what to add or to leave out; part of a sentence.
        is_met: function that returns whether the settings have it.
        names: settings of the flags.
    """

    text: str
    is_met: Callable[[Settings], bool]
    names: tuple[str, ...]


def warn_of_idle_flags(settings: Settings, needs: Sequence[Need[Settings]]) -> None:
    """Log one warning that names the flags without effect, and what each needs; no such flag gives none.

    A flag that has its default value was left out, or changes nothing in any case.
    """
    if idle := list(_idle(settings, needs)):
        logger.warning("flags without effect: %s", "; ".join(idle))


def _idle(settings: Settings, needs: Sequence[Need[Settings]]) -> Iterator[str]:
    given, defaults = dict(settings_in(settings)), dict(settings_in(type(settings)()))
    for need in needs:
        names = [flag_of(name) for name in need.names if given[name] != defaults[name]]
        if names and not need.is_met(settings):
            yield f"{', '.join(names)} ({need.text})"


def _runs(*modes: str) -> Callable[[ServeSettings], bool]:
    return lambda settings: settings.stepping.mode in modes


def _computes(settings: ServeSettings) -> bool:
    return settings.paced is None or settings.paced.paced_arithmetic != "none"


def may_have_gpu(settings: ServeSettings) -> bool:
    """Whether there may be a GPU. Those of other machines are unknown here."""
    if settings.paced is not None or settings.launching.launcher == "ray":
        return True
    return settings.model.device == "cuda" or (settings.model.device == "auto" and has_gpu())


def _moves_experts(settings: ServeSettings) -> bool:
    mode = settings.stepping.mode
    return mode == "async" or (mode == "ep" and settings.paced is None)


# A flag that turns off what does not run anyway, such as --no-standby, has its effect and is not here.
SERVE_NEEDS: tuple[Need[ServeSettings], ...] = (
    Need("needs --mode preemptive", _runs("preemptive"), ("step_policy", "pass_decodes", "max_parked_bytes")),
    Need("needs --mode preemptive or async", _runs("preemptive", "async"), ("max_be_wait",)),
    Need(
        "needs --mode async",
        _runs("async"),
        ("attention_step_policy", "expert_step_policy", "expert_credits", "expert_copies", "expert_timeout"),
    ),
    Need(
        "needs --mode async and a device that is not paced",
        lambda settings: settings.stepping.mode == "async" and settings.paced is None,
        ("inline_limit",),
    ),
    Need(
        "needs --mode async, or --mode ep with a device that is not paced",
        _moves_experts,
        (
            "num_redundant_experts",
            "placement_payback_horizon",
            "placement_least_saving",
            "placement_max_bytes_per_step",
            "placement_gpu",
            "placement_link",
        ),
    ),
    Need(
        "needs --placement-policy",
        lambda settings: settings.placement.plans_by_itself,
        ("placement_interval", "placement_drift"),
    ),
    Need(
        "needs --launcher ray",
        lambda settings: settings.launching.launcher == "ray",
        ("ray_worker_cpus", "ray_timeout", "placement_link_across"),
    ),
    Need(
        "needs several engines",
        lambda settings: settings.num_engines > 1,
        ("route_policy", "route_score", "resume_streams"),
    ),
    Need(
        "leave --route-score out",
        lambda settings: settings.routing.route_score is None,
        ("route_policy",),
    ),
    Need("needs --device paced:GPU", lambda settings: settings.paced is not None, ("pace_dilation",)),
    Need(
        "needs --device paced:GPU with --mode ep or async",
        lambda settings: settings.paced is not None and settings.stepping.mode in ("ep", "async"),
        ("paced_link",),
    ),
    Need(
        "leave --paced-arithmetic none out, which computes nothing",
        _computes,
        ("dtype", "kernels", "threads"),
    ),
    Need(
        "needs --load-format dummy, --gate-override or --device paced:GPU, because requests bring their own seeds",
        lambda settings: (
            settings.model.load_format == "dummy"
            or settings.model.gate_override is not None
            or settings.paced is not None
        ),
        ("seed",),
    ),
    Need(
        "leave --num-gpu-blocks-override out, which sets the same",
        lambda settings: settings.model.num_gpu_blocks_override is None,
        ("kv_cache_memory_bytes", "gpu_memory_utilization"),
    ),
    Need(
        "leave --kv-cache-memory-bytes out, which gives the KV cache its exact size",
        lambda settings: settings.model.kv_cache_memory_bytes is None,
        ("gpu_memory_utilization",),
    ),
    Need("needs a GPU, real or paced", may_have_gpu, ("gpu_memory_utilization",)),
    Need("needs --record", lambda settings: settings.server.record is not None, ("record_key_file", "record_max_size")),
    Need(
        "needs --allowed-origins",
        lambda settings: bool(settings.access.allowed_origins),
        ("allowed_methods", "allowed_headers"),
    ),
)
