"""Measures one choice of each step policy, in CPU microseconds, for tables of several sizes.

    OMP_NUM_THREADS=1 python bench/micro/step_policies.py --json bench/results/micro/step_policies.json

A third of all queues hold tokens of either class, which is a busy device. Sizes are layers x columns: an attention
worker of Mixtral (32 x 1), its worker with two experts, the worker of a model with 48 layers and 16 experts a device,
and all 256 experts of DeepSeek-V3 on one device. Goal (AMoE's items take 800 to 2700 microseconds): 2 to 20
microseconds for the first three.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.views import ATTENTION, EMPTY_QUEUE_NS, NUM_CLASSES, QueueTable, StepPolicy
from moestro.flow.registry import make_step_policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

POLICIES = (
    "mtfs",
    "flfs",
    "fifo",
    "defrag",
    "defrag:lookback=10",
    "urgent:inner=defrag",
    "priority:inner=defrag",
    "urgent:inner=priority+defrag",
    "layered_prefill",
    "qllm",
)
SIZES = (("attention", 32, 0), ("experts", 32, 2), ("experts", 48, 16), ("both", 48, 16), ("experts", 61, 256))
SHARE_FILLED, TABLES, CHOICES, REPEATS = 1 / 3, 16, 300, 25


def make_table(rng: np.random.Generator, kind: str, num_layers: int, num_experts: int) -> QueueTable:
    """Draw the queues of one device; the oldest tokens are younger than the bound of `urgent`."""
    shape = (NUM_CLASSES, num_layers + 1, 1 + num_experts)
    n = (rng.integers(1, 200, shape) * (rng.random(shape) < SHARE_FILLED)).astype(np.int32)
    n[:, num_layers, 1:] = 0
    if kind == "experts":
        n[:, :, ATTENTION] = 0
    oldest_ns = np.where(n > 0, rng.integers(0, 1000, shape), EMPTY_QUEUE_NS)
    of_experts = n[:, :, 1:].sum(axis=2, dtype=np.int32)
    prefill = (n[:, :, ATTENTION] * (rng.random(shape[:2]) < SHARE_FILLED)).astype(np.int32)
    return QueueTable(n, oldest_ns, np.zeros(shape, np.int64), n > 0, of_experts, 1 << 20, prefill)


def choice_us(policy: StepPolicy, tables: list[QueueTable]) -> float:
    """Measure the mean CPU microseconds of a choice, which other processes on the machine disturb less."""
    started = time.process_time_ns()
    for index in range(CHOICES):
        policy(tables[index % TABLES], 1000)
    return (time.process_time_ns() - started) / CHOICES / 1e3


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions, rows = run_record("measured"), []
    for kind, num_layers, num_experts in SIZES:
        tables = [make_table(np.random.default_rng(seed), kind, num_layers, num_experts) for seed in range(TABLES)]
        for text in POLICIES:
            policy = make_step_policy(text, 1.0)
            choice_us(policy, tables)
            row: dict[str, object] = {"layers": num_layers, "experts": num_experts, "queues": kind, "policy": text}
            row["us_per_choice"] = spread([choice_us(policy, tables) for _ in range(REPEATS)])
            rows.append(row)
            print(json.dumps(row), flush=True)
    save(args.json, conditions, {"rounds": REPEATS, "choices": rows})


if __name__ == "__main__":
    main()
