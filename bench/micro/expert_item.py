"""Runs the items of one expert worker alone, for a count of their instructions, which no load on the machine changes.

    for items in 100 300; do PYTHONHASHSEED=0 valgrind --tool=cachegrind --cache-sim=no \\
        --cachegrind-out-file=/dev/null python bench/micro/expert_item.py --items $items; done

The difference of the two counts, divided by 200, is the cost of an item: about 256 tokens in four dispatches of four
homes that are taken in, the choice, the item, and four replies. `group_items.py` measures the same in time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from moestro.core.experts.expert_table import spread_evenly
from moestro.core.stages import DISPATCH, HOP_RECORD, Hop, HopMessage, StageShape
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor
from moestro.flow.registry import make_step_policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from micro.group_items import NUM_EXPERTS, NUM_HOMES, NUM_LAYERS, TOKENS, NullDevice

_WORKER, _WAVES = NUM_HOMES, 8  # the first expert worker, and the different sets of dispatches that it gets in turn


class Sink:
    """Links that lead nowhere."""

    def send(self, message, now_ns: int) -> None:
        """Implement `Links.send`."""


def make_worker(num_slots: int) -> FlowExecutor:
    """Make an expert worker with `num_slots` experts in each layer."""
    num_workers = NUM_HOMES + NUM_EXPERTS
    table = spread_evenly(NUM_LAYERS, NUM_EXPERTS * num_slots, list(range(NUM_HOMES, num_workers)), num_workers)
    shape = StageShape(
        is_sparse=(True,) * NUM_LAYERS,
        num_experts=num_slots,
        num_chosen=1,
        num_rows=0,
        num_places=0,
        num_remote_places=2 * TOKENS * NUM_HOMES,
    )
    peers = PeerSettings(worker=_WORKER, num_workers=num_workers, table=table, num_credits=2 * TOKENS)
    return FlowExecutor(NullDevice(shape, 0), make_step_policy("defrag", 1.0), 1, peers, Sink())


def make_dispatches(num_items: int, num_slots: int) -> list[list[HopMessage]]:
    """Make the dispatches of all homes for each item; of its 256 tokens a home sends each worker a share at random."""
    rng = np.random.default_rng(0)
    shares = [[_records(rng, num_slots) for _ in range(NUM_HOMES)] for _ in range(_WAVES)]
    return [
        [
            HopMessage(_header(home, number, len(records)), records)
            for home, records in enumerate(shares[number % _WAVES])
        ]
        for number in range(num_items)
    ]


def _records(rng: np.random.Generator, num_slots: int) -> np.ndarray:
    records = np.zeros(rng.binomial(TOKENS, 1 / NUM_EXPERTS), HOP_RECORD)
    records["row"] = np.arange(len(records))
    records["place"] = np.sort(rng.permutation(2 * TOKENS)[: len(records)])
    records["slot"] = rng.integers(0, num_slots, len(records))
    return records


def _header(home: int, number: int, num_rows: int) -> Hop:
    layer = number % NUM_LAYERS
    return Hop(kind=DISPATCH, src=home, dst=_WORKER, epoch=0, seq=number, layer=layer, num_rows=num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--slots", type=int, default=1, help="experts of the worker in each layer")
    args = parser.parse_args()
    worker, spent_us = make_worker(args.slots), []
    for messages in make_dispatches(args.items, args.slots):
        started = time.perf_counter_ns()
        for message in messages:
            worker.receive(message, 0)
        while worker.has_room:
            worker.start(0)
            worker.poll(0)
        spent_us.append((time.perf_counter_ns() - started) / 1e3)
    print(f"all dispatches of a layer: least {min(spent_us):.1f} us, median {np.median(spent_us):.1f} us")


if __name__ == "__main__":
    main()
