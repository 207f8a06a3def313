"""Builds a rank of a group that shares the experts of a network, in mode `ep`. Importing this module loads torch."""

from __future__ import annotations

import time
from functools import partial

from moestro.config.launch_spec import LaunchSpec, LockStepSpec
from moestro.core.experts.expert_table import ExpertTable
from moestro.core.model_info import ModelInfo
from moestro.engine.lock_step import LockStepRank, build_lock_step_rank, spread_over_ranks
from moestro.model.experts.expert_exchange import GroupPlace, meet
from moestro.model.experts.spread_device import open_spread_device
from moestro.placement.pair_window import PAIR_INTERVAL
from moestro.wire.layer_messages import ExpertsPlaced, LayerMoving, LayerSettled
from moestro.wire.messages import WakeGroup
from moestro.worker.rank_builder import OnPhase, Send, local_rank_of, scheduler_settings


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
    place = GroupPlace(worker=spec.rank, num_workers=lock_step.num_ranks, timeout_s=lock_step.timeout_s)
    device, info = open_spread_device(
        spec.model,
        place,
        partial(table_of, lock_step),
        lambda: meet(place, lock_step.port, lock_step.listen_fd, lock_step.join_wait_s(time.monotonic_ns())),
        on_phase,
        local_rank_of(spec),
    )
    device.network.sample_choices(PAIR_INTERVAL)
    if spec.records_events:
        device.network.count_visits(lock_step.num_ranks)
    if spec.rank == 0:  # all ranks know the same
        send(ExpertsPlaced(device.placed))
        device.on_moved = lambda version, num_bytes: send(LayerMoving(version, num_bytes))
        device.on_settled = lambda settled: send(LayerSettled(settled))
    rank = build_lock_step_rank(scheduler_settings(spec, info), device, lambda step: send(WakeGroup(step)))
    device.network.on_exchanged = rank.forget_cache
    return rank, info


def table_of(lock_step: LockStepSpec, num_layers: int, num_experts: int) -> ExpertTable:
    """Make the table by which the ranks of a group load their experts, over all layers of the network.

    Raises:
        ConfigError: the network has too few experts, or the slots do not divide evenly.
    """
    if lock_step.placed is not None:
        return lock_step.placed.whole_table()
    return spread_over_ranks(num_layers, num_experts, lock_step.num_ranks, lock_step.num_redundant_experts)
