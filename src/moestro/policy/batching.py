"""Which sequences enter the next plan, and with how many tokens each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import BatchLimits, BatchView

# (view, limits) -> int32[n], tokens of each row in the next plan; 0: not in it. Never more than `num_left`.
BatchPolicy = Callable[[BatchView, BatchLimits], NDArray[np.int32]]


def decode_first(view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
    """Every decode, then prefill chunks in order until the token budget is spent.

    Decodes are never held up by a long prompt, whose chunks take what is left.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, Alg. 3.
    """
    want = np.minimum(view.num_left, limits.max_chunk)
    if int(want.sum()) <= limits.token_budget:
        return want
    first = np.argsort(~view.is_decode, kind="stable")
    asked = want[first]
    before = np.cumsum(asked) - asked
    given = np.empty_like(want)
    given[first] = np.clip(limits.token_budget - before, 0, asked)
    return given


BATCHING: dict[str, BatchPolicy] = {"decode_first": decode_first}
