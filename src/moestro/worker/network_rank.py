"""Builds a rank that runs a network. Importing this module loads torch and transformers, which takes seconds."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from moestro.config.launch_spec import GroupSpec, LaunchSpec
from moestro.core.model_info import ModelInfo
from moestro.core.work import Device
from moestro.engine.lock_step import build_lock_step_rank
from moestro.engine.rank import Rank
from moestro.model.device import open_device
from moestro.model.expert_exchange import GroupPlace, meet
from moestro.model.spread_device import open_spread_device
from moestro.model.staged_open import open_staged_device
from moestro.wire.messages import WakeGroup
from moestro.worker.paced import PACED_NOTE, NetworkAnswers, make_paced_rank, num_blocks_of
from moestro.worker.rank_process import OnPhase, Send, make_preemptive_rank, make_rank, scheduler_settings


def build_network_rank(spec: LaunchSpec, on_phase: OnPhase, send: Send) -> tuple[Rank, ModelInfo]:
    """Load the network that `spec` names, and build the rank that runs it.

    Args:
        on_phase: called with the name of each phase of the load as it begins.
        send: sends a message to the API server.

    Raises:
        ConfigError: the settings cannot be honoured.
        UnsupportedModelError: the checkpoint cannot run here.
        GroupLostError: another rank of the group did not start.
    """
    if spec.group is not None:
        return _build_in_group(spec, spec.group, on_phase, send)
    if spec.stepping.mode == "preemptive" and spec.paced is None:
        return _build_preemptive(spec, on_phase)
    model = spec.model
    if spec.paced is not None:  # the demo network computes, with as many blocks as the modelled device has
        model = replace(model, num_gpu_blocks_override=num_blocks_of(spec.paced, model))
    opened: tuple[Device, ModelInfo] = open_device(model, on_phase, spec.rank)
    device, info = opened
    if spec.paced is not None:
        answers = NetworkAnswers(device)
        info = msgspec.structs.replace(info, device=spec.paced.device, notes=(*info.notes, PACED_NOTE))
        return make_paced_rank(spec, spec.paced, answers, info), info
    return make_rank(spec, device, info), info


def _build_preemptive(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    device, info = open_staged_device(spec.model, spec.scheduler.max_num_batched_tokens, on_phase, spec.rank)
    return make_preemptive_rank(spec, device, info, launch_ahead=1 if device.works_when_polled else 2), info


def _build_in_group(spec: LaunchSpec, group: GroupSpec, on_phase: OnPhase, send: Send) -> tuple[Rank, ModelInfo]:
    place = GroupPlace(worker=spec.rank, num_workers=group.num_ranks, timeout_s=group.timeout_s)
    device, info = open_spread_device(
        spec.model,
        place,
        lambda: meet(place, group.port, group.listen_fd, max(group.join_by_ns - time.monotonic_ns(), 0) / 1e9),
        on_phase,
    )
    return build_lock_step_rank(scheduler_settings(spec, info), device, lambda step: send(WakeGroup(step))), info
