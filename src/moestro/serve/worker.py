"""The rank process with a network: `python -m moestro.serve.worker`."""

from __future__ import annotations

import sys

import msgspec

from moestro.core.work import Device
from moestro.engine.rank import Rank
from moestro.model.device import open_device
from moestro.model.info import LoadedInfo
from moestro.serve.launch_spec import LaunchSpec
from moestro.serve.messages import ModelInfo
from moestro.serve.paced import PACED_NOTE, NetworkAnswers, PacedDevice, cost_of
from moestro.serve.rank_process import OnPhase, make_rank, run_process


def _build(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    loaded: tuple[Device, LoadedInfo] = open_device(spec.model, on_phase, spec.rank)
    device, info = loaded[0], _model_info(spec.model.model, loaded[1])
    if spec.paced is not None:
        device = PacedDevice(cost_of(spec.paced), NetworkAnswers(device))
        info = msgspec.structs.replace(info, device=spec.paced.device, notes=(*info.notes, PACED_NOTE))
    return make_rank(spec, device, info), info


def _model_info(model_id: str, info: LoadedInfo) -> ModelInfo:
    return ModelInfo(
        model_id=model_id,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        sampling_defaults=info.sampling_defaults,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_parameters=info.num_parameters,
        model_type=info.model_type,
        dtype=info.dtype,
        device=info.device,
        num_layers=info.num_layers,
        num_experts=info.num_experts,
        num_experts_per_token=info.num_experts_per_token,
        notes=info.notes,
    )


if __name__ == "__main__":
    sys.exit(run_process(_build))
