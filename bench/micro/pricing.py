"""Measures the cost model's own time: one step, 100 decode steps at once, and a whole item of the priced device.

    python bench/micro/pricing.py [--json bench/results/micro/pricing.json]

The 100 decode steps are also priced one by one, which gives the same figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.request import Script
from moestro.core.work import LOGITS_LAST, SAMPLING_ROW, Forward, Units
from moestro.cost.gpus import H20
from moestro.cost.model import Batch, even_gating, zipf_popularity
from moestro.cost.networks import network_named
from moestro.cost.priced_device import PricedDevice
from moestro.cost.roofline import Roofline, RooflineSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

CALLS, REPEATS, SEQUENCES, ROUNDS, RANKS = 2000, 7, 64, 100, 8


def median_us(call: Callable[[], object]) -> dict[str, float]:
    """Measure median, minimum and maximum of REPEATS means over CALLS calls, microseconds."""
    means = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter_ns() - started) / CALLS / 1e3)
    return {"median": round(statistics.median(means), 2), "min": round(min(means), 2), "max": round(max(means), 2)}


def roofline(name: str, num_ranks: int = 1) -> Roofline:
    network = network_named(name)
    experts = network.experts
    gating = experts and even_gating(zipf_popularity(experts.num_experts, 0.6), experts.top_k, num_ranks)
    return Roofline(RooflineSettings(network=network, gpu=H20, num_ep_ranks=num_ranks, gating=gating))


def decode_item(start: np.ndarray) -> Forward:
    n = len(start)
    units = Units(
        slot=np.arange(n, dtype=np.int32),
        serial=np.arange(n),
        service_class=np.zeros(n, np.uint8),
        start=start,
        num_tokens=np.ones(n, np.int32),
        write_start=start,
        logits=np.full(n, LOGITS_LAST, np.uint8),
        block_tables=np.zeros((n, 1), np.int32),
        sampling=np.zeros(n, SAMPLING_ROW),
        token_ids=None,
    )
    return Forward(units)


def device_item() -> Callable[[], object]:
    """Make a call that launches an item and takes its result."""
    device = PricedDevice(roofline("qwen3-30b-a3b"), 16)
    for serial in range(SEQUENCES):
        device.expect(serial, Script(10**9), 1000)
    item = decode_item(np.arange(SEQUENCES, dtype=np.int32) + 1000)

    def launch_and_poll() -> object:
        device.launch(item, 0)
        return device.poll(10**18)

    return launch_and_poll


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    conditions = run_record("measured")
    start = np.random.default_rng(0).integers(0, 4000, SEQUENCES).astype(np.int32)
    decodes = Batch(start, np.ones_like(start))
    mixed = Batch(np.append(start, [0, 512]).astype(np.int32), np.append(decodes.num_tokens, [300, 1700]))
    one, windowed, group = roofline("qwen3-30b-a3b"), roofline("gpt-oss-120b"), roofline("qwen3-30b-a3b", RANKS)

    def one_by_one() -> object:
        return [one.step_ns(Batch(start + i, decodes.num_tokens)) for i in range(ROUNDS)]

    figures = {
        "step, 64 decodes": median_us(lambda: one.step_ns(decodes)),
        "step, 64 decodes and 2 chunks": median_us(lambda: one.step_ns(mixed)),
        "step, 64 decodes, windowed attention": median_us(lambda: windowed.step_ns(decodes)),
        "100 rounds of 64 decodes at once": median_us(lambda: one.decode_steps_ns(start, ROUNDS)),
        "100 rounds of 64 decodes, windowed": median_us(lambda: windowed.decode_steps_ns(start, ROUNDS)),
        "group step, 8 ranks": median_us(lambda: group.group_step_ns([decodes] * RANKS)),
        "100 rounds of 8 ranks at once": median_us(lambda: group.group_decode_steps_ns([start] * RANKS, ROUNDS)),
        "device item of 64 decodes, launch and poll": median_us(device_item()),
    }
    started = time.perf_counter_ns()
    one_by_one()
    figures["100 rounds one by one"] = {"once": round((time.perf_counter_ns() - started) / 1e3, 1)}
    result = {"unit": "us", "repeats": REPEATS, "figures": figures}
    print(json.dumps(result, indent=1))
    save(arguments.json, conditions, result)


if __name__ == "__main__":
    main()
