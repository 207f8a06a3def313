"""DeepSeek's load balancer of experts (EPLB), with its exact outputs, for all layers at once.

Both entry points have the signatures and results of a peer, so that they can take its place:

* `rebalance_experts` has those of DeepSeek's `eplb.py`,
* `rebalance_experts_vllm` has those of vLLM's `DefaultEplbPolicy.rebalance_experts`, with NumPy arrays.

The algorithm has three parts. Groups of experts go to nodes, redundant slots go to the experts with the most load per
copy, and the copies of a node go to its devices. Packing takes items from the most loaded down, and puts each into the
least loaded pack that has room. It does not look at the expert's other copies, so a device may get two of them.

Equal loads keep their order. Both peers sort with an unstable sort, whose order of equal loads depends on versions and
on the processor: copies of one expert are then numbered otherwise in `logical_to_physical`, and experts of equal load
change places.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64s = NDArray[np.int64]
FEW_ROWS = 8  # that are packed one after the other


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is placed where.

    Attributes:
        num_replicas: Slots of a layer.
        num_groups: Groups of experts, each of which stays on one node.
        num_nodes, num_gpus: Machines, and devices of all machines.
        precision: Type in which loads are divided and summed. A difference in the last bit can change a choice.
    """

    num_replicas: int
    num_groups: int
    num_nodes: int
    num_gpus: int
    precision: type[np.float32 | np.float64]


def rebalance_experts(
    weight: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Place copies of experts as DeepSeek's function of that name does.

    Groups stay on a node where `num_nodes` divides `num_groups`; otherwise groups and nodes are ignored.

    Args:
        weight: float[layers, experts], load of each expert; anything that `np.asarray` takes, also a tensor on the CPU.
        num_replicas: Slots of a layer on all devices, a multiple of `num_gpus`.
        num_groups: Groups of experts.
        num_nodes: Machines.
        num_gpus: Devices, a multiple of `num_nodes`.

    Returns:
        `physical_to_logical` int64[layers, num_replicas], expert in each slot;
        `logical_to_physical` int64[layers, experts, most copies], slots of each expert, padded with -1;
        `logical_count` int64[layers, experts], copies of each expert.

    Raises:
        ValueError: The sizes do not divide each other, or a load is negative or not finite.

    Source: deepseek-ai/EPLB, commit d52c72d.
    """
    sizes = _checked_sizes(num_replicas, num_groups, num_nodes, num_gpus, np.float32)
    physical_to_logical, rank, count = _place(_checked_weight(weight, sizes), sizes)
    num_layers, num_experts = count.shape
    logical_to_physical = np.full((num_layers, num_experts, int(count.max())), -1, np.int64)
    slots = np.broadcast_to(np.arange(num_replicas), physical_to_logical.shape)
    logical_to_physical[np.arange(num_layers)[:, None], physical_to_logical, rank] = slots
    return physical_to_logical, logical_to_physical, count


def rebalance_experts_vllm(
    weight: ArrayLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: ArrayLike | None = None,
) -> Int64s:
    """Place copies of experts as vLLM's default policy does.

    vLLM divides and sums loads in double precision, and keeps an expert that stays on its device in its slot.

    Args:
        weight, num_replicas, num_groups, num_nodes, num_ranks: As in `rebalance_experts`; a rank is a device.
        old_global_expert_indices: int[layers, num_replicas], expert that each slot holds now. None means that no slot
            needs to be kept.

    Returns:
        int64[layers, num_replicas], expert in each slot.

    Raises:
        ValueError: The sizes do not divide each other, a load is negative or not finite, or the old table has another
            shape.

    Source: vLLM 0.33.0, `vllm/distributed/eplb/policy/default.py`.
    """
    sizes = _checked_sizes(num_replicas, num_groups, num_nodes, num_ranks, np.float64)
    physical_to_logical, _, _ = _place(_checked_weight(weight, sizes), sizes)
    if old_global_expert_indices is None:
        return physical_to_logical
    return keep_slots(physical_to_logical, np.asarray(old_global_expert_indices), num_ranks)


def keep_slots(new: Int64s, old: NDArray[np.integer], num_devices: int) -> Int64s:
    """Reorder the slots of each device so that experts which stay on it stay in their slots.

    Args:
        new, old: int[layers, slots of all devices], expert in each slot.
        num_devices: Devices, which have equally many slots.

    Returns:
        int64[layers, slots of all devices]: `new` in another order. Slots that no expert keeps get the other experts
        of the device in the order of `new`.

    Raises:
        ValueError: The shapes differ.
    """
    if new.shape != old.shape:
        raise ValueError(f"the old table has the shape {old.shape}, and the new one {new.shape}")
    num_slots = new.shape[1] // num_devices
    came, was = new.reshape(-1, num_slots), old.reshape(-1, num_slots)  # a row is one layer of one device
    rows = np.arange(len(came))
    is_used = np.zeros(came.shape, np.bool_)
    is_kept = np.zeros(came.shape, np.bool_)
    for slot in range(num_slots):
        fits = (came == was[:, slot, None]) & ~is_used
        first = fits.argmax(axis=1)
        stays = fits[rows, first]
        is_used[rows, first] |= stays
        is_kept[:, slot] = stays
    placed = was.astype(np.int64)
    placed[~is_kept] = came[~is_used]  # both masks have equally many slots of each row, in order
    return placed.reshape(new.shape)


def _checked_sizes(
    num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, precision: type[np.float32 | np.float64]
) -> _Sizes:
    if min(num_replicas, num_groups, num_nodes, num_gpus) < 1:
        raise ValueError("num_replicas, num_groups, num_nodes and the number of devices must be at least 1")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1  # both peers then ignore groups and nodes
    if num_gpus % num_nodes:
        raise ValueError(f"{num_gpus} devices cannot be divided among {num_nodes} nodes")
    if num_replicas % num_gpus:
        raise ValueError(f"{num_replicas} slots cannot be divided among {num_gpus} devices")
    return _Sizes(num_replicas, num_groups, num_nodes, num_gpus, precision)


def _checked_weight(weight: ArrayLike, sizes: _Sizes) -> NDArray[np.float32]:
    """float32[layers, experts]; both peers begin with that type."""
    load = np.asarray(weight).astype(np.float32)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"the load must be [layers, experts], got the shape {load.shape}")
    if (load < 0).any() or not np.isfinite(load.sum(axis=1)).all():
        raise ValueError("the load has a figure that is negative or not finite")
    num_experts = load.shape[1]
    if num_experts % sizes.num_groups:
        raise ValueError(f"{num_experts} experts cannot be divided into {sizes.num_groups} groups")
    if sizes.num_replicas < num_experts:
        raise ValueError(f"{num_experts} experts do not fit into {sizes.num_replicas} slots")
    return load


def _place(weight: NDArray[np.float32], sizes: _Sizes) -> tuple[Int64s, Int64s, Int64s]:
    """Place all copies.

    Returns:
        int64[layers, slots], expert in each slot; int64[layers, slots], number of this copy among those of its expert;
        int64[layers, experts], copies of each expert.
    """
    num_layers, num_experts = weight.shape
    num_nodes, group_size = sizes.num_nodes, num_experts // sizes.num_groups
    # Experts in the order of their nodes; `by_node` has an expert's place in it, `expert_at` the inverse.
    of_group = weight.reshape(num_layers, sizes.num_groups, group_size).sum(axis=-1).astype(sizes.precision)
    place = _slots(*_pack(of_group, num_nodes), sizes.num_groups // num_nodes)
    by_node = (place[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, num_experts)
    expert_at = np.argsort(by_node, axis=1)
    # From here on, a row is one node of one layer, and experts are numbered within it.
    by_row = np.take_along_axis(weight, expert_at, axis=1).reshape(num_layers * num_nodes, -1)
    load: NDArray[np.floating] = by_row.astype(sizes.precision)
    expert, rank, count = _replicate(load, sizes.num_replicas // num_nodes)
    each = np.take_along_axis(load / count.astype(sizes.precision), expert, axis=1)
    slot = _slots(*_pack(each, sizes.num_gpus // num_nodes), sizes.num_replicas // sizes.num_gpus)
    copy_in = np.argsort(slot, axis=1)
    first = np.arange(num_nodes)[:, None] * (num_experts // num_nodes)
    in_slot = np.take_along_axis(expert, copy_in, axis=1).reshape(num_layers, num_nodes, -1) + first
    return (
        np.take_along_axis(expert_at, in_slot.reshape(num_layers, -1), axis=1),
        np.take_along_axis(rank, copy_in, axis=1).reshape(num_layers, -1),
        np.take_along_axis(count.reshape(num_layers, -1), by_node, axis=1),
    )


def _slots(pack: Int64s, rank: Int64s, pack_size: int) -> Int64s:
    """Number of each item where packs lie one after another."""
    return pack * pack_size + rank


def _pack(weight: NDArray[np.floating], num_packs: int) -> tuple[Int64s, Int64s]:
    """Put equally many items into each pack: the heaviest first, each into the lightest pack that has room.

    Args:
        weight: float[rows, items]; sums of packs have its precision.
        num_packs: Packs of each row.

    Returns:
        int64[rows, items], pack of each item, and its number in the pack.
    """
    num_rows, num_items = weight.shape
    pack_size = num_items // num_packs
    if pack_size == 1:  # the order of the items stays
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros((num_rows, num_items), np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    heaviest_first = np.take_along_axis(weight, order, axis=1).T.copy()  # [items, rows]: a step reads one row
    if num_rows <= FEW_ROWS:
        each = [_pack_row(row, num_packs, weight.dtype.type) for row in heaviest_first.T]
        return _in_order(order, *(np.stack(parts, axis=1) for parts in zip(*each, strict=True)))
    sums = np.zeros((num_rows, num_packs), weight.dtype)
    flat_sums, num_in = sums.reshape(-1), np.zeros(num_rows * num_packs, np.int64)
    first = np.arange(num_rows) * num_packs
    packs, ranks = np.empty((2, num_items, num_rows), np.int64)
    for i in range(num_items):
        packs[i] = sums.argmin(axis=1)
        chosen = first + packs[i]
        ranks[i] = num_in[chosen]
        num_in[chosen] += 1
        is_full = ranks[i] == pack_size - 1
        flat_sums[chosen] = np.where(is_full, np.inf, flat_sums[chosen] + heaviest_first[i])
    return _in_order(order, packs, ranks)


def _in_order(order: Int64s, packs: Int64s, ranks: Int64s) -> tuple[Int64s, Int64s]:
    """Return packs and ranks, int64[items, rows], as int64[rows, items] where items have their first order."""
    pack, rank = np.empty((2, *order.shape), np.int64)
    np.put_along_axis(pack, order, packs.T, axis=1)
    np.put_along_axis(rank, order, ranks.T, axis=1)
    return pack, rank


def _pack_row(
    heaviest_first: NDArray[np.floating], num_packs: int, precision: type[np.floating]
) -> tuple[Int64s, Int64s]:
    """Pack one row as `_pack` does, with the same sums, in a fifth of the time."""
    sizes, pack_size = [0] * num_packs, len(heaviest_first) // num_packs
    heap = [(0.0, pack) for pack in range(num_packs)]  # the first one of equally light packs comes first
    packs, ranks = [], []
    for weight in heaviest_first.tolist():
        total, pack = heap[0]
        packs.append(pack)
        ranks.append(sizes[pack])
        sizes[pack] += 1
        if sizes[pack] == pack_size:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (float(precision(total + weight)), pack))
    return np.array(packs), np.array(ranks)


def _replicate(load: NDArray[np.floating], num_slots: int) -> tuple[Int64s, Int64s, Int64s]:
    """Give each redundant slot to the expert with the most load per copy.

    Args:
        load: float[rows, experts].
        num_slots: Slots of each row, at least one for each expert.

    Returns:
        int64[rows, slots], expert of each copy; int64[rows, slots], number of this copy among those of its expert;
        int64[rows, experts], copies of each expert.
    """
    num_rows, num_experts = load.shape
    rows = np.arange(num_rows)
    count = np.ones(load.shape, np.int64)
    expert = np.tile(np.arange(num_slots), (num_rows, 1))
    rank = np.zeros((num_rows, num_slots), np.int64)
    each = load.copy()  # load per copy
    for slot in range(num_experts, num_slots):
        chosen = each.argmax(axis=1)
        expert[:, slot] = chosen
        rank[:, slot] = count[rows, chosen]
        count[rows, chosen] += 1
        each[rows, chosen] = load[rows, chosen] / count[rows, chosen].astype(load.dtype)
    return expert, rank, count
