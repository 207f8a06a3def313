"""The rank process with a network: `python -m moestro.worker.worker`."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from moestro.config.launch_spec import LaunchSpec
from moestro.core.work import Device
from moestro.engine.rank import Rank
from moestro.model.device import open_device
from moestro.model.info import LoadedInfo
from moestro.model.staged_open import open_staged_device
from moestro.wire.messages import ModelInfo
from moestro.worker.paced import PACED_NOTE, NetworkAnswers, make_paced_rank, num_blocks_of
from moestro.worker.rank_process import OnPhase, leave, make_preemptive_rank, make_rank, run_process


def _build(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    if spec.stepping.mode == "preemptive" and spec.paced is None:
        return _build_preemptive(spec, on_phase)
    model = spec.model
    if spec.paced is not None:  # the demo network computes, with as many blocks as the modelled device has
        model = replace(model, num_gpu_blocks_override=num_blocks_of(spec.paced, model))
    loaded: tuple[Device, LoadedInfo] = open_device(model, on_phase, spec.rank)
    device, info = loaded[0], _model_info(spec.model.model, loaded[1])
    if spec.paced is not None:
        answers = NetworkAnswers(device)
        info = msgspec.structs.replace(info, device=spec.paced.device, notes=(*info.notes, PACED_NOTE))
        return make_paced_rank(spec, spec.paced, answers, info), info
    return make_rank(spec, device, info), info


def _build_preemptive(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    device, loaded = open_staged_device(spec.model, spec.scheduler.max_num_batched_tokens, on_phase, spec.rank)
    info = _model_info(spec.model.model, loaded)
    return make_preemptive_rank(spec, device, info, launch_ahead=1 if device.works_when_polled else 2), info


# Rounding depends on the shape of a batch. In these dtypes it changes a token only where two candidates are within
# about 1e-5 of each other, and an undisturbed answer could be either. In half precision it changes many.
_EXACT_DTYPES = ("float32", "float64")


def _model_info(model_id: str, info: LoadedInfo) -> ModelInfo:
    return ModelInfo(
        model_id=model_id,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        sampling_defaults=info.sampling_defaults,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        num_parameters=info.num_parameters,
        model_type=info.model_type,
        dtype=info.dtype,
        device=info.device,
        num_layers=info.num_layers,
        num_experts=info.num_experts,
        num_experts_per_token=info.num_experts_per_token,
        notes=info.notes,
        is_exact=info.dtype in _EXACT_DTYPES,
    )


if __name__ == "__main__":
    leave(run_process(_build))
