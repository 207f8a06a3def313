"""What one long sequence costs the decode step of many short ones on a CPU: each alone, and both in one step.

    OMP_NUM_THREADS=1 python bench/micro/decode_mix.py --json bench/results/micro/decode_mix_cpu.json

The demo model in float32: 63 sequences of 32 tokens, one of 2,000, all 64 together. Every round measures all three, so
that a drift of the machine falls on all; the ratio to the sum of the two parts is taken round by round.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Forward, Units
from moestro.model.device import TorchDevice, open_device
from moestro.model.settings import ModelSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.models import DEMO
from shared.results import make_parser, save, spread

SHORT, LONG = [32] * 63, [2000]
STEPS, ROUNDS, BLOCK_SIZE, NUM_BLOCKS = 7, 5, 16, 512


def decode(lengths: list[int]) -> Forward:
    """One token of each sequence. What its KV cache holds does not matter to the time, so no prompt is computed."""
    num_units, start = len(lengths), np.array(lengths, np.int32) - 1
    blocks_of = -(-np.array(lengths) // BLOCK_SIZE)
    tables = np.zeros((num_units, blocks_of.max()), np.int32)
    for row, first, count in zip(tables, blocks_of.cumsum() - blocks_of, blocks_of, strict=True):
        row[:count] = np.arange(first, first + count)
    sampling = np.zeros(num_units, SAMPLING_ROW)
    sampling["top_p"], sampling["repetition_penalty"] = 1, 1
    sampling["num_logprobs"], sampling["num_prompt_logprobs"] = -1, -1
    units = Units(
        slot=np.arange(num_units, dtype=np.int32),
        serial=np.arange(num_units),
        service_class=np.zeros(num_units, np.uint8),
        start=start,
        num_tokens=np.ones(num_units, np.int32),
        write_start=start,
        logits=np.full(num_units, LOGITS_LAST, np.uint8),
        block_tables=tables,
        sampling=sampling,
        token_ids=np.arange(3, 3 + num_units, dtype=np.int32),
    )
    return Forward(units)


def step_ms(device: TorchDevice, item: Forward) -> float:
    """Median of STEPS steps, after one that is not counted."""
    times = []
    for _ in range(STEPS + 1):
        started = time.perf_counter()
        device.launch(item, 0)
        device.poll(0)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def main() -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args()
    conditions = run_record("measured")
    settings = ModelSettings(
        model=str(DEMO), dtype="float32", device="cpu", block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS
    )
    device, _ = open_device(settings)
    rounds = [[step_ms(device, decode(lengths)) for lengths in (SHORT, LONG, SHORT + LONG)] for _ in range(ROUNDS)]
    short, long, both = (list(column) for column in zip(*rounds, strict=True))
    result = {
        "num_threads": torch.get_num_threads(),
        "load_average_after": round(os.getloadavg()[0], 2),  # of the last minute: other jobs may share the machine
        "rounds": ROUNDS,
        "model": "demo, float32",
        "short_ms": spread(short),
        "long_ms": spread(long),
        "both_ms": spread(both),
        "both_over_sum": spread([c / (a + b) for a, b, c in zip(short, long, both, strict=True)]),
    }
    print(json.dumps(result, indent=1))
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
