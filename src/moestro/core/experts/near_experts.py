"""How far experts are from the ranks whose tokens they compute: same device, same machine, or another machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAME_DEVICE, SAME_NODE, OTHER_NODE = 0, 1, 2  # how far a row or an expert travels
DISTANCES = ("device", "machine", "other")  # their names for operators

Floats = NDArray[np.float64]


def expert_shares(parts: Floats, machine_of: NDArray[np.integer], num_sources: int) -> Floats:
    """Tell which part of each layer's experts is how near to each source of tokens.

    An expert counts at the distance of its nearest copy.

    Args:
        parts: float64[workers, layers, experts], part of each expert's tokens that each worker gets; 0 means no copy.
        machine_of: int[workers], machine of each worker.
        num_sources: sources (attention DP ranks), of which source s has its device on worker s.

    Returns:
        float64[sources, 3, layers], fractions by distance, which sum to 1.
    """
    has_copy = parts > 0
    shares = np.zeros((num_sources, len(DISTANCES), parts.shape[1]))
    for source in range(num_sources):
        own, near = has_copy[source], has_copy[machine_of == machine_of[source]].any(axis=0)
        shares[source, SAME_DEVICE] = own.mean(axis=1)
        shares[source, SAME_NODE] = (near & ~own).mean(axis=1)
        shares[source, OTHER_NODE] = (~near).mean(axis=1)
    return shares


def visit_shares(visits: Floats, parts: Floats, machine_of: NDArray[np.integer]) -> Floats:
    """Tell how far the tokens of each source travel to their experts, if each copy gets its part of all tokens.

    Args:
        visits: float64[sources, layers, experts], visits of each source's tokens.
        parts, machine_of: as in `expert_shares`.

    Returns:
        float64[sources, 3], fractions of a source's visits by distance; NaN for a source without visits.
    """
    shares = np.full((len(visits), len(DISTANCES)), np.nan)
    on_machines = {machine: parts[machine_of == machine].sum(axis=0) for machine in np.unique(machine_of).tolist()}
    for source, own in enumerate(visits):
        total = own.sum()
        if total > 0:
            at_home = float((own * parts[source]).sum())
            on_machine = float((own * on_machines[int(machine_of[source])]).sum())
            shares[source] = np.array([at_home, on_machine - at_home, total - on_machine]) / total
    return shares.clip(0.0, 1.0)  # differences may round below 0
