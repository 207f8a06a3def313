"""A rank process: reads its launch spec from stdin and runs the rank's loop. The caller supplies the rank.

The process serves until the API server sends `Shutdown`, or until stdin ends because the API server is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NoReturn

from moestro.config.launch_spec import STACK_DUMP, LaunchSpec, read_launch_spec
from moestro.config.user_code import accept_user_code
from moestro.core.model_info import ModelInfo
from moestro.core.stages import StagedDevice
from moestro.core.work import Device
from moestro.engine.cache_events import CacheEvents
from moestro.engine.rank import Rank, build_preemptive_rank, build_rank
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError, GroupLostError, MoestroError
from moestro.wire.messages import Failed, FromRank, Phase, Ready, Shutdown, identity_of
from moestro.worker.channel import Channel
from moestro.worker.kv_publisher import KvPublisher
from moestro.worker.rank_loop import run_rank

OnPhase = Callable[[str], None]  # called when a phase of the start begins
Send = Callable[[FromRank], None]  # sends a message to the API server
Build = Callable[[LaunchSpec, OnPhase, Send], tuple[Rank, ModelInfo]]

# A rank that lost its group waits so long for the API server, which ends the whole group when it sees which rank ended
# first. The API server sees the end of a process at once, and waits 0.2 s for its last messages.
_GROUP_END_S = 2.0


def run_process(build: Build) -> int:
    """Run one rank; returns its exit status.

    Args:
        build: function that makes the rank and its model information.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API server decides when to leave
    faulthandler.enable()
    faulthandler.register(STACK_DUMP)  # needs no interpreter lock: it also works while the main loop hangs in a kernel
    accept_user_code()
    spec = read_launch_spec(sys.stdin.buffer)
    logging.basicConfig(level=spec.log_level.upper(), format=f"%(levelname)s engine {spec.rank}: %(message)s")
    channel = Channel(spec.address, identity_of(spec.rank, spec.launch), sys.stdin.fileno())
    try:
        rank, info = build(spec, _PhaseTimer(spec.launched_ns, channel), channel.send)
        publish = _publish(spec, rank)
        channel.send(Ready(info))
        run_rank(rank, channel, time.monotonic_ns, publish)
    except GroupLostError as error:
        if _is_dismissed(channel):  # The group is stopping, and another rank left first.
            return 0
        channel.send(Failed(_cause(error)))
        return 1
    except Exception as error:
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        channel.send(Failed(_cause(error), isinstance(error, ConfigError)))
        return 1
    else:
        return 0
    finally:
        channel.close()


def _is_dismissed(channel: Channel) -> bool:
    """Wait for a shutdown message. False means that none came within `_GROUP_END_S`."""
    until_ns = time.monotonic_ns() + int(_GROUP_END_S * 1e9)
    while (left_ns := until_ns - time.monotonic_ns()) > 0:
        if any(isinstance(message, Shutdown) for message in channel.receive(left_ns / 1e9)):
            return True
    return False


def _publish(spec: LaunchSpec, rank: Rank) -> Callable[[], None]:
    """Make the function to call after each step: it publishes the prefix cache, if the settings say so."""
    if spec.kv_events is None:
        return lambda: None
    scheduler = rank.scheduler
    publisher = KvPublisher(spec.kv_events, spec.rank, CacheEvents(scheduler), scheduler.settings.block_size)
    return publisher.publish


def leave(status: int) -> NoReturn:
    """End this process with `status` at once.

    The interpreter would take seconds to unload torch's modules, and nothing is left to save.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _PhaseTimer:
    """Called when a phase begins, it reports the previous one, so that together they account for every second."""

    def __init__(self, launched_ns: int, channel: Channel) -> None:
        self._name, self._since_ns = "load libraries", launched_ns
        self._channel = channel

    def __call__(self, name: str) -> None:
        now_ns = time.monotonic_ns()
        self._channel.send(Phase(self._name, (now_ns - self._since_ns) / 1e9))
        self._name, self._since_ns = name, now_ns


def make_rank(spec: LaunchSpec, device: Device, info: ModelInfo) -> Rank:
    """Build the rank that `spec` describes in `fused` mode, on `device`."""
    return build_rank(scheduler_settings(spec, info), device)


def make_preemptive_rank(spec: LaunchSpec, device: StagedDevice, info: ModelInfo, launch_ahead: int = 1) -> Rank:
    """Build the rank that `spec` describes in `preemptive` mode, on `device`, with as many places for each class."""
    settings = replace(scheduler_settings(spec, info), max_num_urgent_seqs=spec.scheduler.max_num_seqs)
    policy = spec.stepping.make_step_policy()
    return build_preemptive_rank(settings, device, policy, launch_ahead, passes_decodes=spec.stepping.pass_decodes)


def scheduler_settings(spec: LaunchSpec, info: ModelInfo) -> SchedulerSettings:
    """Combine the operator's settings with what the loaded model determines."""
    return SchedulerSettings(
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        **asdict(spec.scheduler),
    )


def _cause(error: Exception) -> str:
    """Describe an error in one line; errors of other packages get their type, which often says more than the text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MoestroError) else f"{type(error).__name__}: {text}"
