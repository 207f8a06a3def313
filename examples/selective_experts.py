"""A step policy of one's own: experts that are at hand run first, the others when enough tokens wait for them.

    moestro serve --mode preemptive --step-policy examples/selective_experts.py:SelectiveExperts

Where not all experts fit into fast memory, a batch of one that does not costs its weights' way there. This policy lets
tokens gather before such an expert for `max_wait_ns` at most. Each token still gets all of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moestro.core.views import ATTENTION, BE, LS, QueueTable, Run

ALL = 2**31 - 1


@dataclass(frozen=True)
class SelectiveExperts:
    """Runs what costs no transfer while there is some.

    Args:
        resident: physical experts of every layer that are at hand. The default is an example.
        min_tokens: tokens for whose sake another expert is fetched.
        max_wait_ns: time in one queue after which a token waits for no others.
    """

    overlaps_prefill: ClassVar[bool] = False  # plans follow one another

    resident: frozenset[int] = frozenset(range(4))
    min_tokens: int = 8
    max_wait_ns: int = 50_000_000

    def __call__(self, view: QueueTable, now_ns: int) -> Run:
        """What runs next: deep layers first, so that what was begun ends."""
        tokens, oldest_ns = view.n.sum(axis=0), view.oldest_ns.min(axis=0)
        fetched = ~np.isin(np.arange(tokens.shape[1]), [ATTENTION, *(1 + expert for expert in self.resident)])
        runnable = view.runnable.any(axis=0)
        ready = runnable & (~fetched | (tokens >= self.min_tokens) | (oldest_ns <= now_ns - self.max_wait_ns))
        layers, groups = np.nonzero(ready if ready.any() else runnable)
        return Run(int(layers[-1]), int(groups[-1]), ALL, (LS, BE))
