"""Measures links between workers: tensors with their messages over ZeroMQ, and in two phases over gloo.

    OMP_NUM_THREADS=1 python bench/micro/links.py --json bench/results/micro/links.json

Two processes send a message of one size to and fro over the production links, waiting in `select` as workers do. The
two ways take turns. Each figure is of one message in one direction: the time from before its encoding until the
receiver has its tensor, and the processor time of both processes together. The default of --inline-limit follows from
the sizes at which two phases cost less.
"""

from __future__ import annotations

import multiprocessing
import select
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from moestro.config.run_record import run_record
from moestro.core.stages import DISPATCH, HOP_RECORD, REPLY, Hop, HopMessage
from moestro.model.channels import TensorChannels
from moestro.model.staged.staged_device import TorchFrames
from moestro.wire.hop_frames import Hello, HopLimits
from moestro.wire.sockets import ListenAddress
from moestro.worker.peer_links import PeerLinks
from moestro.worker.two_phase import TwoPhase

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

HIDDEN_SIZE = 256  # of the demo model; a row of float32 has 1 KiB
ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
ALL_INLINE, NONE_INLINE = 1 << 40, 0
WAYS = {"inline": ALL_INLINE, "two_phase": NONE_INLINE}
REPEATS, ROUNDS = 9, 40  # of each way and size; messages to and fro in a repeat


class End:
    """One of two workers: a home, number 0, or a worker with experts, number 1."""

    def __init__(self, directory: str, worker: int, way: str) -> None:
        self.worker, self.next_seq = worker, 0
        limits = HopLimits(
            worker=worker,
            num_workers=2,
            num_layers=1,
            num_chosen=1,
            num_slots=1,
            num_places=max(ROWS),
            num_remote_places=max(ROWS),
        )
        frames = TorchFrames(SimpleNamespace(vector_form=(HIDDEN_SIZE, torch.float32)))
        settings = TwoPhase(given_limit=WAYS[way], channels=TensorChannels("127.0.0.1"))
        addresses = [f"ipc://{directory}/{way}-{each}" for each in range(2)]
        self.links = PeerLinks(Hello(worker, 0), ListenAddress(addresses[worker]), frames, limits, settings)
        self.links.connect(1 - worker, addresses[1 - worker], 0)

    def send(self, num_rows: int, tensor: torch.Tensor) -> None:
        """Send a message of `num_rows` rows."""
        hop = Hop(
            kind=DISPATCH if self.worker == 0 else REPLY,
            src=self.worker,
            dst=1 - self.worker,
            epoch=0,
            seq=self.next_seq,
            layer=0,
            num_rows=num_rows,
            dtype="float32",
        )
        self.next_seq += 1
        records = np.zeros(num_rows, HOP_RECORD)
        records["row"] = np.arange(num_rows)
        self.links.send(HopMessage(hop, records, tensor), 0)

    def receive(self) -> HopMessage:
        """Wait for a message."""
        while True:
            if messages := self.links.receive(0):
                return messages[0]
            if not self.links.has_messages():
                select.select(self.links.fds, (), (), 1.0)


def echo(directory: str, pipe: Connection) -> None:
    """Send back what comes, and tell the processor time of each block of messages."""
    ends = {way: End(directory, 1, way) for way in WAYS}
    while (block := pipe.recv()) is not None:
        way, num_rows, num_rounds = block
        tensor, end = torch.zeros(num_rows, HIDDEN_SIZE), ends[way]
        began = time.process_time_ns()
        for _ in range(num_rounds):
            assert len(end.receive().tensor) == num_rows
            end.send(num_rows, tensor)
        pipe.send(time.process_time_ns() - began)
    for end in ends.values():
        end.links.close()


def measure(end: End, pipe: Connection, way: str, num_rows: int, num_rounds: int = ROUNDS) -> tuple[float, float]:
    """Return µs from one end to the other, the median of the rounds, and µs of processor time a message."""
    tensor, times = torch.ones(num_rows, HIDDEN_SIZE), []
    pipe.send((way, num_rows, num_rounds))
    began = time.process_time_ns()
    for _ in range(num_rounds):
        sent_ns = time.perf_counter_ns()
        end.send(num_rows, tensor)
        end.receive()
        times.append(time.perf_counter_ns() - sent_ns)
    spent = time.process_time_ns() - began
    spent += pipe.recv()
    return float(np.median(times)) / 2e3, spent / num_rounds / 2e3


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions, rows = run_record("measured"), []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        pipe, other = context.Pipe()
        peer = context.Process(target=echo, args=(directory, other), daemon=True)
        peer.start()
        ends = {way: End(directory, 0, way) for way in WAYS}
        while not ends["two_phase"].links.sent[1].num_two_phase:  # until the channel is open
            for way, end in ends.items():
                measure(end, pipe, way, ROWS[0], 5)
        for num_rows in ROWS:
            found = {way: [] for way in WAYS}
            for _ in range(REPEATS):
                for way, end in ends.items():
                    found[way].append(measure(end, pipe, way, num_rows))
            row = {"tensor_bytes": num_rows * HIDDEN_SIZE * 4}
            for way, pairs in found.items():
                one_way, cpu = zip(*pairs, strict=True)
                row[way] = {"one_way_us": spread(list(one_way)), "cpu_us": spread(list(cpu))}
            rows.append(row)
            print(row, flush=True)
        pipe.send(None)
        peer.join(10)
        for end in ends.values():
            end.links.close()
    save(args.json, conditions, {"rows": rows})


if __name__ == "__main__":
    main()
