"""The rank process: `python -m moestro.serve.worker`, its launch spec one line of JSON on stdin.

It serves until the front door says `Shutdown`, or until stdin ends because the front door is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import msgspec

from moestro.engine.rank import Rank, build_preemptive_rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError, MoestroError
from moestro.flow.core import StepPolicy
from moestro.model.device import open_device
from moestro.model.info import LoadedInfo
from moestro.model.staged_open import open_staged_device
from moestro.policy.stepping.basic import in_order
from moestro.policy.stepping.qllm import ExpertLevelPreemption
from moestro.serve.channel import Channel
from moestro.serve.launch_spec import STACK_DUMP, LaunchSpec
from moestro.serve.messages import Failed, ModelInfo, Phase, Ready, identity_of
from moestro.serve.rank_loop import run_rank


def main() -> int:
    """Run one rank; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front door decides when to leave
    faulthandler.enable()
    faulthandler.register(STACK_DUMP)  # needs no interpreter lock: it also answers when the main loop hangs in a kernel
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=LaunchSpec)
    logging.basicConfig(level=spec.log_level.upper(), format=f"%(levelname)s engine {spec.rank}: %(message)s")
    channel = Channel(spec.address, identity_of(spec.rank, spec.launch), sys.stdin.fileno())
    try:
        rank, info = _build(spec, _PhaseTimer(spec.launched_ns, channel))
        channel.send(Ready(info))
        run_rank(rank, channel, time.monotonic_ns)
    except Exception as error:
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        channel.send(Failed(_cause(error), isinstance(error, ConfigError)))
        return 1
    else:
        return 0
    finally:
        channel.close()


class _PhaseTimer:
    """Told when a phase begins, reports the one before: together they account for every second."""

    def __init__(self, launched_ns: int, channel: Channel) -> None:
        self._name, self._since_ns = "load libraries", launched_ns
        self._channel = channel

    def __call__(self, name: str) -> None:
        now_ns = time.monotonic_ns()
        self._channel.send(Phase(self._name, (now_ns - self._since_ns) / 1e9))
        self._name, self._since_ns = name, now_ns


def _build(spec: LaunchSpec, on_phase: Callable[[str], None]) -> tuple[Rank, ModelInfo]:
    if spec.stepping.mode == "preemptive":
        return _build_preemptive(spec, on_phase)
    device, info = open_device(spec.model, on_phase, spec.rank)
    return build_rank(_scheduler_settings(spec, info), device), _model_info(spec.model.model, info)


def _build_preemptive(spec: LaunchSpec, on_phase: Callable[[str], None]) -> tuple[Rank, ModelInfo]:
    stepping, limits = spec.stepping, spec.limits
    max_tokens, max_bytes = limits.max_num_batched_tokens, stepping.max_parked_bytes
    device, info = open_staged_device(spec.model, max_tokens, max_bytes, on_phase, spec.rank)
    policy: StepPolicy = in_order
    if stepping.step_policy == "qllm":
        wait_ns = None if math.isinf(stepping.max_be_wait) else round(stepping.max_be_wait * 1e9)
        policy = ExpertLevelPreemption(max_wait_ns=wait_ns)
    settings = replace(_scheduler_settings(spec, info), max_num_urgent_seqs=limits.max_num_seqs)
    launch_ahead = 1 if device.works_when_polled else 2
    return build_preemptive_rank(settings, device, policy, launch_ahead), _model_info(spec.model.model, info)


def _scheduler_settings(spec: LaunchSpec, info: LoadedInfo) -> SchedulerSettings:
    return SchedulerSettings(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        **spec.limits.for_scheduler(),
    )


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


def _cause(error: Exception) -> str:
    """One line: an error of ours says what to do; any other gets its type, which often says more than its text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MoestroError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
