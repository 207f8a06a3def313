"""Expert pressure: how loaded the workers are that compute the experts of a source's tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Visits to a layer that a source is assumed to make as the whole group does, besides its own: an estimate from fewer of
# its own is mostly chance, and a source without any has the group's pressure. Values from 1 to 256 are alike, and 1024
# is worse for a source of 5 tokens a second (`bench/simulator/pressure_constants.py`).
PRIOR_VISITS = 64.0
# An oldest token that waits in a queue for so long counts as much as a mean load. It is a whole token's time, a target
# of chats (DistServe, OSDI 2024, table 1: 0.1 s), and not that of a layer, because the greatest age of all queues of a
# worker is an extreme: in a healthy group it adds little, and where a worker stands still it soon outweighs any load.
# Named, not swept: no simulated group has this figure.
FULL_WAIT_S = 0.1


def expert_pressures(visits: Floats, parts: Floats, oldest_s: Floats | None = None) -> Floats:
    """Estimate for each source how loaded the workers are to which its tokens go, relative to the mean worker.

    The load of a worker in a layer is the number of visits that it gets from all sources. The pressure of source s is
    the mean over layers l of

        sum over workers w of  q[s, l, w] * (load[l, w] / mean load[l] + oldest_s[w] / FULL_WAIT_S)

    where q is the part of the source's visits that goes to the worker; the mean is that of the workers which hold
    experts of the layer. Each source's visits are completed by `PRIOR_VISITS` of the group's.

    Args:
        visits: float64[sources, layers, experts], recent visits of each source's tokens.
        parts: float64[workers, layers, experts], part of each expert's tokens that each worker gets.
        oldest_s: float64[workers], time for which the oldest token waits in a queue of each worker, in seconds. None
            means that no token waits in a queue, because the group computes in step.

    Returns:
        float64[sources], a ratio. 1 means that the source's tokens meet the mean load; without waits, the mean over all
        visits is at least 1. All are 1 while there are no visits.
    """
    total = visits.sum(axis=0)
    layers = np.flatnonzero(total.sum(axis=1) > 0)
    if not len(layers):
        return np.ones(len(visits))
    total, parts = total[layers], parts[:, layers]
    load = np.einsum("le,wle->lw", total, parts)
    holds = (parts > 0).any(axis=2).T
    burden = load / (load.sum(axis=1) / holds.sum(axis=1))[:, None]
    if oldest_s is not None:
        burden = burden + oldest_s / FULL_WAIT_S
    of_expert = np.einsum("lw,wle->le", burden, parts)
    mixed = visits[:, layers] + PRIOR_VISITS * total / total.sum(axis=1, keepdims=True)
    by_layer = np.einsum("sle,le->sl", mixed, of_expert) / mixed.sum(axis=2)
    pressures: Floats = by_layer.mean(axis=1)
    return pressures
