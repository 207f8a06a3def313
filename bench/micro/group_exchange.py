"""Measures an exchange of rows between processes of one machine: Moestro's sockets beside gloo, in turn.

    OMP_NUM_THREADS=1 python bench/micro/group_exchange.py --json bench/results/micro/group_exchange.json

Each of 2 and of 4 processes sends every other one the same number of bytes, and takes in as many. A layer of
`--mode ep` makes three exchanges and a step one more. Microseconds are of an exchange, on the clock and of worker 0's
processor time; each round makes 300 exchanges of either kind, one kind after the other. gloo is `torch.distributed` on
the loopback interface, as `ep` used it before.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed

from moestro.config.run_record import run_record
from moestro.model.experts.exchange import GroupExchange, GroupPlace, Meeting
from moestro.wire.sockets import SocketExchange

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

WORKERS, SIZES = (2, 4), (64, 2048, 65_536, 1 << 20)  # processes; bytes for each other one
ROUNDS, NUM_EXCHANGES, NUM_FIRST = 5, 300, 20
SOCKETS, GLOO = "sockets", "gloo"
TIMEOUT_S = 60.0


def run_worker(worker: int, num_workers: int, folder: str, pipe: Connection) -> None:
    """Take part in all exchanges; worker 0 sends back (way, bytes, microseconds, of processor time)."""
    torch.set_num_threads(1)
    place = GroupPlace(worker=worker, num_workers=num_workers, timeout_s=TIMEOUT_S)
    store = distributed.FileStore(f"{folder}/sockets", num_workers)
    host = SocketExchange(worker, num_workers, TIMEOUT_S, store)
    group = GroupExchange(place, Meeting(store, host), torch.device("cpu"))
    distributed.init_process_group(
        GLOO,
        store=distributed.FileStore(f"{folder}/gloo", num_workers),
        rank=worker,
        world_size=num_workers,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    one_each, found = [1] * num_workers, []

    def by_gloo(rows: torch.Tensor) -> None:
        distributed.all_to_all_single(torch.empty_like(rows), rows)

    ways: dict[str, Callable[[torch.Tensor], object]] = {
        SOCKETS: lambda rows: group.exchange_rows(rows, one_each, one_each),
        GLOO: by_gloo,
    }
    for _ in range(ROUNDS):
        for num_bytes in SIZES:
            rows = torch.zeros(num_workers, num_bytes, dtype=torch.uint8)
            for way, exchange in ways.items():
                for _ in range(NUM_FIRST):
                    exchange(rows)
                began, cpu_began = time.perf_counter(), time.process_time()
                for _ in range(NUM_EXCHANGES):
                    exchange(rows)
                taken = time.perf_counter() - began, time.process_time() - cpu_began
                found.append((way, num_bytes, *(1e6 * each / NUM_EXCHANGES for each in taken)))
    host.close()
    distributed.destroy_process_group()
    if worker == 0:
        pipe.send(found)


def measure(num_workers: int) -> list[dict[str, object]]:
    """A row for each size."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=run_worker, args=(worker, num_workers, folder, theirs))
            for worker in range(num_workers)
        ]
        for process in processes:
            process.start()
        found = ours.recv()
        for process in processes:
            process.join()
    clock, cpu = defaultdict(list), defaultdict(list)
    for way, num_bytes, us, cpu_us in found:
        clock[num_bytes, way].append(us)
        cpu[num_bytes, way].append(cpu_us)
    return [
        {
            "workers": num_workers,
            "bytes": num_bytes,
            "us": {way: spread(clock[num_bytes, way]) for way in (SOCKETS, GLOO)},
            "cpu_us": {way: spread(cpu[num_bytes, way]) for way in (SOCKETS, GLOO)},
            "gloo_over_sockets": spread(
                [theirs / ours for ours, theirs in zip(clock[num_bytes, SOCKETS], clock[num_bytes, GLOO], strict=True)]
            ),
        }
        for num_bytes in SIZES
    ]


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions = run_record("measured")
    rows = [row for num_workers in WORKERS for row in measure(num_workers)]
    for row in rows:
        print(row)
    save(args.json, conditions, {"rounds": ROUNDS, "exchanges": NUM_EXCHANGES, "rows": rows})


if __name__ == "__main__":
    main()
