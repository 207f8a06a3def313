"""FlashLB (vllm-ascend) with one window, in the plainest way: copies by risk, each to the least loaded device."""

from __future__ import annotations

import numpy as np

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.placement.contract import PlaceView

RISK = 0.674  # standard deviations, the upper quartile


def flashlb(view: PlaceView, risk: float = RISK) -> ExpertTable:
    """Place as many copies as there are slots, the heaviest first, and never two of an expert on one device."""
    load = view.load.total + risk * np.sqrt(view.load.variance)
    num_devices, num_slots = view.devices.num_devices, int(view.devices.num_slots[0])
    logical_of = np.full_like(view.table.logical_of, EMPTY)
    for layer, weights in enumerate(load):
        counts = np.ones(len(weights), np.int64)
        for _ in range(num_devices * num_slots - len(weights)):
            counts[np.where(counts < num_devices, weights / counts, -1.0).argmax()] += 1
        loads, filled = np.zeros(num_devices), np.zeros(num_devices, np.int64)
        for expert in np.argsort(-weights / counts, kind="stable").tolist():
            for _ in range(int(counts[expert])):
                is_open = (filled < num_slots) & (logical_of[:, layer] != expert).all(axis=1)
                if not is_open.any():
                    break
                device = int(np.where(is_open, loads, np.inf).argmin())
                logical_of[device, layer, filled[device]] = expert
                filled[device] += 1
                loads[device] += weights[expert] / counts[expert]
    return ExpertTable(view.table.version + 1, logical_of, view.table.num_experts, view.devices.is_alive.copy())
