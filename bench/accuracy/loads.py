"""The loads on which predictions are judged, and the seeds that separate them from what predictions are fitted on.

The probes of `moestro calibrate --server` are a load of their own, `FITTED_NAME`, with seed `FITTED_SEED`. No load here
has its name or its seed, and none of them is seen before the prediction is made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FITTED_NAME, FITTED_SEED = "probes", 0
JUDGED_SEEDS = (101, 102, 103)
NUM_REQUESTS = 60
HASHED = 16  # tokens of a block in the trace's form


@dataclass(frozen=True, kw_only=True)
class HeldOutLoad:
    """A load.

    Attributes:
        differs_by: what it changes: rate, mix, policy, or number of engines.
        share: rate, as a share of the saturation that the simulator predicts for this load.
        prompts, answers: least and most tokens.
        num_groups: groups of requests whose prompts have their first half in common; 0: all prompts differ.
        policy: batch policy of the engines, where the system has several.
        count: engines.
    """

    differs_by: str
    share: float
    prompts: tuple[int, int] = (16, 256)
    answers: tuple[int, int] = (8, 48)
    num_groups: int = 0
    policy: str | None = None
    count: int = 1


LOADS = {
    "mixed, 0.3": HeldOutLoad(differs_by="rate", share=0.3),
    "mixed, 0.6": HeldOutLoad(differs_by="rate", share=0.6),
    "mixed, 0.8": HeldOutLoad(differs_by="rate", share=0.8),
    "long prompts, 0.5": HeldOutLoad(differs_by="mix", share=0.5, prompts=(300, 900), answers=(4, 16)),
    "long answers, 0.5": HeldOutLoad(differs_by="mix", share=0.5, prompts=(16, 64), answers=(40, 80)),
    "shared prompts, 0.5": HeldOutLoad(differs_by="mix", share=0.5, prompts=(256, 512), num_groups=8),
    "prefill first, 0.6": HeldOutLoad(differs_by="policy", share=0.6, policy="prefill_first"),
    "two engines, 0.6": HeldOutLoad(differs_by="engines", share=0.6, count=2),
}


def write_trace(path: Path, load: HeldOutLoad, seed: int, rate: float) -> None:
    """Write a trace of Poisson arrivals at `rate` requests a second, with the names of its prompts' blocks."""
    assert seed != FITTED_SEED
    rng = np.random.default_rng([seed, NUM_REQUESTS])
    prompts = rng.integers(*load.prompts, size=NUM_REQUESTS, endpoint=True)
    answers = rng.integers(*load.answers, size=NUM_REQUESTS, endpoint=True)
    times = np.cumsum(rng.exponential(1 / rate, NUM_REQUESTS))
    groups = rng.integers(max(load.num_groups, 1), size=NUM_REQUESTS)
    lines = []
    for row in range(NUM_REQUESTS):
        num_blocks = -(-int(prompts[row]) // HASHED)
        num_shared = load.prompts[0] // 2 // HASHED if load.num_groups else 0
        common = [10_000_000 + int(groups[row]) * 1000 + i for i in range(num_shared)]
        own = [row * 1000 + i for i in range(num_blocks - num_shared)]
        line = {"chat_id": row, "parent_chat_id": -1, "timestamp": round(float(times[row]), 6)}
        line |= {"input_length": int(prompts[row]), "output_length": int(answers[row]), "hash_ids": common + own}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))
