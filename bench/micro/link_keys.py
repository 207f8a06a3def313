"""Measures what a message between workers costs both processes: over ipc, and over TCP with CURVE.

    python bench/micro/link_keys.py --json bench/results/micro/link_keys.json

Two ends in one process exchange messages of one token with hidden states of two sizes. The figure is the CPU time of
the whole process, in which ZeroMQ's threads encrypt and decrypt. Each round measures all in turn, so that drift of the
machine affects them equally. Loopback has no network card: on a real network, both kinds cost more.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from moestro.config.run_record import run_record
from moestro.core.stages import DISPATCH, HOP_RECORD, Hop, HopMessage
from moestro.wire.hop_frames import Hello, HopLimits
from moestro.wire.sockets import ListenAddress, new_curve_keys
from moestro.worker.peer_links import PeerLinks

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

SIZES = (4 << 10, 64 << 10)  # bytes: one token of a hidden size of 2,048 in bfloat16, and 16 of them
MESSAGES, ROUNDS, AT_ONCE = 2000, 7, 50


class BytesFrames:
    """Frames whose tensors are bytes of any size."""

    dtype = ""

    def pack(self, tensor: Any) -> bytes:
        return bytes(tensor)

    def unpack(self, frame: bytes | memoryview, num_rows: int) -> int:
        return len(frame)


def make_pair(addresses: tuple[ListenAddress, ListenAddress]) -> tuple[PeerLinks, PeerLinks]:
    """Connect a home and a worker with experts that listen at `addresses`."""
    made = []
    for worker, address in enumerate(addresses):
        limits = HopLimits(
            worker=worker, num_workers=2, num_layers=1, num_chosen=1, num_slots=1, num_places=9, num_remote_places=9
        )
        made.append(PeerLinks(Hello(worker, 0), address, BytesFrames(), limits))
    home, expert = made
    home.connect(1, expert.address, 0)
    expert.connect(0, home.address, 0)
    while (home.launches[1], expert.launches[0]) != (0, 0):
        home.receive(0)
        expert.receive(0)
    return home, expert


def cpu_us(home: PeerLinks, expert: PeerLinks, num_bytes: int, first: int) -> float:
    """Measure the CPU time of a message from `home` to `expert`, in microseconds; `first`: number of the first one."""
    records, tensor = np.zeros(1, HOP_RECORD), bytes(num_bytes)
    before_s, num_received = time.process_time(), 0
    for seq in range(first, first + MESSAGES):
        hop = Hop(kind=DISPATCH, src=0, dst=1, epoch=0, seq=seq, layer=0, num_rows=1)
        home.send(HopMessage(hop, records, tensor), 0)
        while num_received < seq - first + 1 - AT_ONCE:
            num_received += len(expert.receive(0))
    while num_received < MESSAGES:
        num_received += len(expert.receive(0))
    return 1e6 * (time.process_time() - before_s) / MESSAGES


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions = run_record("measured")
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        keys = new_curve_keys()
        places = {
            "ipc": tuple(ListenAddress(f"ipc://{directory}/{worker}") for worker in range(2)),
            "tcp with CURVE": tuple(ListenAddress("tcp://127.0.0.1:*", keys) for _ in range(2)),
        }
        pairs = {name: make_pair(addresses) for name, addresses in places.items()}
        for pair in pairs.values():
            for links in pair:
                stack.enter_context(contextlib.closing(links))
        num_sent = dict.fromkeys(pairs, 0)
        for _ in range(ROUNDS):
            for num_bytes in SIZES:
                for name, (home, expert) in pairs.items():
                    took = cpu_us(home, expert, num_bytes, num_sent[name])
                    figures.setdefault(f"{name}, {num_bytes >> 10} KiB", []).append(took)
                    num_sent[name] += MESSAGES
    result = {"cpu_us_of_a_message": {name: spread(values) for name, values in figures.items()}}
    print(json.dumps(result, indent=2))
    save(args.json, conditions, result)


if __name__ == "__main__":
    main()
