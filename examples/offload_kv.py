"""An evict policy of one's own: where KV runs out, a best-effort request goes on later from a copy in host memory.

    moestro serve --kv-offloading-size 4 --scheduling-policy qllm --evict-policy examples/offload_kv.py:OffloadKV

The policies that come with Moestro evict the request that has computed least, because that is what would be lost. Here
nothing is lost, so the request that holds most goes: one copy makes the most room. Short requests compute again, which
is little, and leave the room to others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.views import BE, EvictView, Victim
from moestro.engine.policies.batching import LeastComputedBeFirst


@dataclass(frozen=True)
class OffloadKV:
    """Chooses the request that frees its KV, and whether host memory keeps it.

    Args:
        min_tokens: with fewer a request computes them again.
        makes_way: best effort yields to latency-sensitive requests that wait, too.
    """

    min_tokens: int = 64
    makes_way: bool = True

    def __call__(self, view: EvictView) -> Victim:
        """The largest best-effort request that fits into host memory; if there is none, the one that loses least."""
        num_tokens = view.num_computed_tokens
        fits = (num_tokens >= self.min_tokens) & (num_tokens <= view.num_free_host_tokens)
        rows = np.flatnonzero(fits & (view.service_class == BE))
        if len(rows):
            return Victim(int(rows[num_tokens[rows].argmax()]), keeps=True)
        return Victim(LeastComputedBeFirst()(view).row, keeps=False)
