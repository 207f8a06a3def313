"""Builds a rank that runs a network. Importing this module loads torch and transformers, which takes seconds."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import msgspec

from moestro.config.launch_spec import GroupSpec, LaunchSpec, LockStepSpec
from moestro.core.experts.expert_table import ExpertTable
from moestro.core.request import ModelInfo
from moestro.cost.settings import PacedSettings
from moestro.engine.lock_step import LockStepRank, build_lock_step_rank, spread_over_ranks
from moestro.engine.rank import Rank
from moestro.errors import ConfigError
from moestro.model.channels import TensorChannels
from moestro.model.device import open_device
from moestro.model.experts.exchange import GroupPlace, Meeting, meet
from moestro.model.experts.expert_open import TorchSlots, open_expert_device
from moestro.model.experts.spread_device import open_spread_device
from moestro.model.network import WorkerShare
from moestro.model.staged.staged_device import ExpertTorchDevice, TorchFrames, open_staged_device
from moestro.placement.load_window import PAIR_INTERVAL
from moestro.wire.messages import ExpertsPlaced, LayerMoving, LayerSettled, WakeGroup
from moestro.wire.sockets import SocketExchange
from moestro.worker.paced import NetworkAnswers, make_paced_rank, num_blocks_of, paced_notes
from moestro.worker.paced_group import build_paced_group_rank, load_paced_part, num_part_blocks
from moestro.worker.rank_builder import (
    OnPhase,
    Send,
    local_rank_of,
    make_preemptive_rank,
    make_rank,
    scheduler_settings,
)
from moestro.worker.rank_process import WorkerPart, WorkerSizes


def _meet(place: GroupPlace, lock_step: LockStepSpec) -> Meeting:
    """Meet the other ranks of a group, and connect to them."""
    store = meet(place, lock_step.port, lock_step.listen_fd, lock_step.join_wait_s(time.monotonic_ns()))
    return Meeting(store, SocketExchange(place.worker, place.num_workers, place.timeout_s, store))


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
        partial(_meet, place, lock_step),
        on_phase,
        local_rank_of(spec),
    )
    device.network.sample_choices(PAIR_INTERVAL)
    if spec.records_events:
        device.network.count_visits(lock_step.num_ranks)
    if spec.rank == 0:  # all ranks know the same
        send(ExpertsPlaced(device.placed))
        device.moves.on_moved = lambda version, num_bytes: send(LayerMoving(version, num_bytes))
        device.moves.on_settled = lambda settled: send(LayerSettled(settled))
    rank = build_lock_step_rank(
        scheduler_settings(spec, info), device, lambda step: send(WakeGroup(step)), info.host_block_ns
    )
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


_LOOPBACK = "127.0.0.1"


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
    device, info = open_device(model, on_phase, replace(local_rank_of(spec), records_steps=True))
    if spec.paced is None:
        device.network.sample_choices(PAIR_INTERVAL)
    if spec.paced is not None:
        answers = NetworkAnswers(device)
        info = _paced(info, spec.paced)
        if lock_step is not None:
            return build_paced_group_rank(spec, lock_step, answers, info, send), info
        return make_paced_rank(spec, spec.paced, answers, info), info
    rank = make_rank(spec, device, info, runs_ahead=device.runs_ahead)
    device.network.on_exchanged = rank.forget_cache
    return rank, info


def _build_preemptive(spec: LaunchSpec, on_phase: OnPhase) -> tuple[Rank, ModelInfo]:
    local = replace(local_rank_of(spec, num_classes=2), records_steps=True)
    device, info = open_staged_device(spec.model, spec.scheduler.max_num_batched_tokens, on_phase, local)
    rank = make_preemptive_rank(spec, device, info, launch_ahead=1 if device.works_when_polled else 2)
    device.network.on_exchanged = rank.forget_cache
    return rank, info


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
        device, info = open_device(model, on_phase, local_rank_of(spec))
        info = _paced(info, spec.paced)
        return load_paced_part(spec, sizes, NetworkAnswers(device), info)
    group = spec.group
    assert group is not None, "a part belongs to a group"
    share = WorkerShare(
        worker=group.worker,
        make_table=partial(_table, group),
        num_remote_places=sizes.num_remote_places,
        keeps_empty_slots=group.has_experts,
    )
    if not sizes.num_rows:
        expert_device, info = open_expert_device(spec.model, share, on_phase, spec.rank)
        return _part(expert_device, info, None, spec)
    max_tokens = spec.scheduler.max_num_batched_tokens
    local = replace(local_rank_of(spec, num_classes=2), records_steps=True)
    home_device, info = open_staged_device(spec.model, max_tokens, on_phase, local, share)
    return _part(home_device, info, info, spec)


def _paced(info: ModelInfo, paced: PacedSettings) -> ModelInfo:
    """Describe the network that computes the answers of a paced device."""
    notes = (*info.notes, *paced_notes(paced))
    return msgspec.structs.replace(info, device=paced.device, pace_dilation=paced.pace_dilation, notes=notes)


def _table(group: GroupSpec, num_layers: int, num_experts: int) -> ExpertTable:
    """Make the table by which the workers of a group load their experts."""
    if num_experts < group.num_shares:
        has = f"has {num_experts} experts a layer" if num_experts else "is dense"
        raise ConfigError(
            f"--mode async spreads experts over {group.num_shares} workers, and the network {has}: lower --experts,"
            " or take another --mode"
        )
    return group.expert_table(num_layers, num_experts)


def _part(device: ExpertTorchDevice, network: ModelInfo, info: ModelInfo | None, spec: LaunchSpec) -> WorkerPart:
    def on_home(home: Rank) -> None:
        device.network.on_exchanged = home.forget_cache

    return WorkerPart(
        device=device,
        num_experts=network.num_experts,
        info=info,
        tensors=TorchFrames(device),
        memory=TorchSlots(device.network, spec.model) if device.shape.num_experts else None,
        launch_ahead=1 if device.works_when_polled else 2,
        # Neither gloo nor NCCL encrypts.
        channels=TensorChannels(_LOOPBACK, device.network.device) if spec.keys is None else None,
        on_home=on_home,
    )
