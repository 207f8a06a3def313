"""Opens the device that works in stages: the network, its KV cache, and room for the tokens inside the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moestro.core.model_info import ModelInfo
from moestro.core.stages import NUM_PLANS, StageShape
from moestro.errors import ConfigError
from moestro.model.device import CheckedNetwork, open_network
from moestro.model.experts.worker_share import WorkerShare
from moestro.model.settings import LocalRank, ModelSettings
from moestro.model.staged.staged_device import StagedTorchDevice
from moestro.model.staged.staged_network import StagedNetwork


def open_staged_device(
    settings: ModelSettings,
    max_tokens: int,
    on_phase: Callable[[str], None] = lambda _: None,
    local: LocalRank | None = None,
    share: WorkerShare | None = None,
) -> tuple[StagedTorchDevice, ModelInfo]:
    """Open a device that works in stages; otherwise as `open_device`.

    Args:
        settings: `max_parked_bytes` is the memory for the tokens inside the network, taken from the KV cache's. With
            less than two plans take, a plan that passes another may have to wait until the other's layer is complete.
        max_tokens: tokens of one plan.
        local: as for `open_device`. None means alone on the machine, with steps of `max_tokens` tokens.
        share: part of the network to keep, for an attention worker or a colocated one. None means all of it.

    Raises:
        ConfigError: as `open_device`; or the bytes do not hold one plan; or nothing remains for the KV cache.
        UnsupportedModelError: as `open_device`; or the network cannot run in stages.
    """
    local = local or LocalRank(max_tokens=max_tokens)
    checked = open_network(settings, on_phase, local)
    on_phase("pack weights")
    checked.network.pack_linears()
    staged = StagedNetwork(checked.network)  # whose check needs all experts
    if share is not None:
        on_phase("cut weights")
        share.cut(checked.network)
    checked.network.pack_experts()
    num_guests = 0 if share is None else share.num_guests
    shape, parked_bytes = _choose_shape(checked, staged, max_tokens, settings.max_parked_bytes)
    form = staged.token_form(checked.num_chosen)
    shape, parked_bytes = replace(shape, num_guests=num_guests), parked_bytes + num_guests * form.guest_bytes
    on_phase("allocate KV cache")
    graphs = _plan_graphs(checked) if local.records_steps and not settings.enforce_eager else None
    checked.network.graph_bytes = 0 if graphs is None else graphs.num_bytes
    pools, info = checked.allocate(settings, parked_bytes)
    device = StagedTorchDevice(staged, pools, shape)
    if graphs is not None:
        on_phase("record graphs")
        device.replay(graphs.record(staged, pools))
    on_phase("ready")
    return device, info


def _choose_shape(
    checked: CheckedNetwork, staged: StagedNetwork, max_tokens: int, max_parked_bytes: int | None
) -> tuple[StageShape, int]:
    """Choose as many places as the bytes hold, and compute the bytes of rows and places together."""
    network = checked.network
    form = staged.token_form(checked.num_chosen)
    row_bytes, place_bytes = form.row_bytes, form.place_bytes
    num_rows = NUM_PLANS * max_tokens
    num_places = num_rows
    least = num_rows * row_bytes + max_tokens * place_bytes
    if max_parked_bytes is not None:
        if max_parked_bytes < least:
            raise ConfigError(
                f"--max-parked-bytes {max_parked_bytes} does not hold one step of {max_tokens} tokens: give at least"
                f" {least}, or lower --max-num-batched-tokens."
            )
        if place_bytes:
            num_places = min(num_places, (max_parked_bytes - num_rows * row_bytes) // place_bytes)
    shape = StageShape(
        is_sparse=staged.is_sparse,
        num_experts=network.num_slots,
        num_chosen=checked.num_chosen,
        num_rows=num_rows,
        num_places=num_places,
    )
    return shape, num_rows * row_bytes + num_places * place_bytes


def _plan_graphs(checked: CheckedNetwork) -> Any:
    """Plan the graphs of the network's layers; None for a network that has none, among them all on a CPU."""
    if checked.network.device.type == "cpu" or checked.network.exchange is None:
        return None
    from moestro.model.cuda.layer_graphs import plan_layer_graphs  # noqa: PLC0415 - it imports Triton

    local, max_model_len, block_size = checked.local, checked.facts.max_model_len, checked.probe.block_size
    return plan_layer_graphs(checked.network, local.max_seqs, max_model_len, block_size, max_tokens=local.max_tokens)
