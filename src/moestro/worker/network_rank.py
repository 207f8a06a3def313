"""Builds a rank that runs a network. Importing this module loads torch and transformers, which takes seconds."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from moestro.config.launch_spec import LaunchSpec
from moestro.core.model_info import ModelInfo
from moestro.core.work import Device
from moestro.engine.rank import Rank
from moestro.model.device import open_device
from moestro.model.staged_open import open_staged_device
from moestro.worker.paced import PACED_NOTE, NetworkAnswers, make_paced_rank, num_blocks_of
from moestro.worker.paced_group import build_paced_group_rank
from moestro.worker.rank_process import OnPhase, Send, make_preemptive_rank, make_rank
from moestro.worker.spread_rank import build_spread_rank


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
    lock_step = spec.lock_step
    if lock_step is not None and spec.paced is None:
        return build_spread_rank(spec, lock_step, on_phase, send)
    if spec.stepping.mode == "preemptive" and spec.paced is None:
        return _build_preemptive(spec, on_phase)
    model = spec.model
    if spec.paced is not None:  # the demo network computes, with as many blocks as the modelled device has
        num_ep_ranks = 1 if lock_step is None else lock_step.num_ranks
        model = replace(model, num_gpu_blocks_override=num_blocks_of(spec.paced, model, num_ep_ranks))
    opened: tuple[Device, ModelInfo] = open_device(model, on_phase, spec.rank)
    device, info = opened
    if spec.paced is not None:
        answers = NetworkAnswers(device)
        info = msgspec.structs.replace(info, device=spec.paced.device, notes=(*info.notes, PACED_NOTE))
        if lock_step is not None:
            return build_paced_group_rank(spec, lock_step, answers, info, send), info
        return make_paced_rank(spec, spec.paced, answers, info), info
    return make_rank(spec, device, info), info


def _build_preemptive(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    device, info = open_staged_device(spec.model, spec.scheduler.max_num_batched_tokens, on_phase, spec.rank)
    return make_preemptive_rank(spec, device, info, launch_ahead=1 if device.works_when_polled else 2), info
