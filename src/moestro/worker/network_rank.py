"""Builds a rank that runs a network. Importing this module loads torch and transformers, which takes seconds."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from moestro.config.launch_spec import LaunchSpec
from moestro.core.model_info import ModelInfo
from moestro.core.work import Device
from moestro.engine.rank import Rank
from moestro.errors import ConfigError
from moestro.model.device import open_device
from moestro.model.staged_open import open_staged_device
from moestro.worker.group_process import OnPhase, WorkerPart, WorkerSizes
from moestro.worker.paced import PACED_NOTE, NetworkAnswers, make_paced_rank, num_blocks_of
from moestro.worker.paced_part import load_paced_part, num_part_blocks
from moestro.worker.rank_builder import make_preemptive_rank, make_rank


def build_network_rank(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    """Load the network that `spec` names, and build the rank that runs it.

    Args:
        on_phase: called with the name of each phase of the load as it begins.

    Raises:
        ConfigError: the settings cannot be honoured.
        UnsupportedModelError: the checkpoint cannot run here.
    """
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


def load_network_part(spec: LaunchSpec, sizes: WorkerSizes, on_phase: OnPhase) -> WorkerPart:
    """Load the part of the network that a worker of a group owns.

    Args:
        on_phase: called with the name of each phase of the load as it begins.

    Raises:
        ConfigError: the settings cannot be honoured.
        UnsupportedModelError: the checkpoint cannot run here.
    """
    if spec.paced is not None:  # the demo network computes the answers of homes
        if not sizes.num_rows:
            return load_paced_part(spec, sizes, None, None)
        num_blocks = num_part_blocks(spec, spec.paced)
        model = replace(spec.model, num_gpu_blocks_override=num_blocks)
        device, info = open_device(model, on_phase, spec.rank)
        info = msgspec.structs.replace(info, device=spec.paced.device, notes=(*info.notes, PACED_NOTE))
        return load_paced_part(spec, sizes, NetworkAnswers(device), info)
    raise ConfigError("--mode async with a network comes with branch weights")
