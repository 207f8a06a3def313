"""Builds a rank of a group that shares the experts of a network, in mode `ep`. Importing this module loads torch."""

from __future__ import annotations

import time

from moestro.config.launch_spec import LaunchSpec, LockStepSpec
from moestro.core.expert_table import ExpertTable
from moestro.core.model_info import ModelInfo
from moestro.engine.lock_step import LockStepRank, build_lock_step_rank, spread_over_ranks
from moestro.model.expert_exchange import GroupPlace, meet
from moestro.model.spread_device import open_spread_device
from moestro.placement.pair_window import PAIR_INTERVAL
from moestro.wire.messages import WakeGroup
from moestro.worker.rank_builder import OnPhase, Send, scheduler_settings


def build_spread_rank(
    spec: LaunchSpec, lock_step: LockStepSpec, on_phase: OnPhase, send: Send
) -> tuple[LockStepRank, ModelInfo]:
    """Load this rank's share of the network, join the group, and build the rank.

    Args:
        on_phase: called with the name of each phase of the load as it begins.
        send: sends a message to the API server.

    Raises:
        ConfigError: the settings cannot be honoured.
        UnsupportedModelError: the checkpoint cannot run here.
        GroupLostError: another rank of the group did not start.
    """
    num_ranks = lock_step.num_ranks
    place = GroupPlace(worker=spec.rank, num_workers=num_ranks, timeout_s=lock_step.timeout_s)

    def make_table(num_layers: int, num_experts: int) -> ExpertTable:
        return spread_over_ranks(num_layers, num_experts, num_ranks)

    device, info = open_spread_device(
        spec.model,
        place,
        make_table,
        lambda: meet(place, lock_step.port, lock_step.listen_fd, lock_step.join_wait_s(time.monotonic_ns())),
        on_phase,
    )
    device.network.sample_choices(PAIR_INTERVAL)
    if spec.records_events:
        device.network.count_visits(num_ranks)
    return build_lock_step_rank(scheduler_settings(spec, info), device, lambda step: send(WakeGroup(step))), info
