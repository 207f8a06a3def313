"""Measures how decode steps on the own CPU kernels scale with threads (`--threads`).

    python bench/micro/kernel_threads.py --work /tmp/bench --threads 1 2 --json bench/results/micro/kernel_threads.json

Models, contexts and steps are those of `cpu_kernels.py`. The figures are elapsed time, so that the machine must have
nothing else to do: the least of many steps, in rounds that take the numbers of threads in turn. A step of one row can
gain no more than the threads read more memory a second (`read_gb_s`); `step_gb_s` is what steps read. Set
GOMP_SPINCOUNT=10000, as `moestro serve` does for its engines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from moestro.config.run_record import run_record
from moestro.model.kernels.library import KernelBuild, KernelLibrary
from moestro.model.network import Network
from moestro.model.pools import KVPools
from moestro.model.step import PagedStep

sys.path.insert(0, str(Path(__file__).parents[1]))
from micro.cpu_kernels import CPU, NUM_ROWS, bytes_touched, decode_units, open_networks
from shared.models import DEMO, make_random_model
from shared.results import make_parser, save

ROUNDS, STEPS, WARM_STEPS = 7, 12, 3


def use_threads(library: KernelLibrary, count: int) -> None:
    torch.set_num_threads(count)
    library.function["set_threads"](count)


def least_ms(network: Network, pools: KVPools, num_rows: int) -> float:
    """Least elapsed time of a decode step, up to the logits."""
    units, best = decode_units(num_rows), float("inf")
    for step in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        network.logits(PagedStep(units, pools, CPU))
        if step >= WARM_STEPS:
            best = min(best, time.perf_counter() - started)
    return 1e3 * best


def read_gb_s(count: int) -> float:
    """GB/s with which some threads read memory that no cache holds."""
    torch.set_num_threads(count)
    data, best = torch.ones(1 << 27, dtype=torch.int64), float("inf")
    for _ in range(7):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return round(data.numel() * 8 / best / 1e9, 1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the random model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    conditions = run_record("measured")
    library = KernelBuild().wait()
    if library is None:
        raise SystemExit("the kernels cannot be compiled here")
    read = {count: read_gb_s(count) for count in args.threads}
    print(json.dumps({"read_gb_s": read}), flush=True)
    rows = []
    for model, directory in (("demo", DEMO), ("640m", make_random_model(args.work / "random-640m"))):
        network, pools = open_networks(directory, library)["own"]
        for num_rows in NUM_ROWS:
            best = dict.fromkeys(args.threads, float("inf"))
            for _ in range(ROUNDS):
                for count in args.threads:
                    use_threads(library, count)
                    best[count] = min(best[count], least_ms(network, pools, num_rows))
            first = best[args.threads[0]]
            times = {count: round(ms, 2) for count, ms in best.items()}
            ratios = {count: round(first / ms, 2) for count, ms in best.items()}
            touched = bytes_touched(network, decode_units(num_rows))
            speeds = {count: round(touched / 1e6 / ms, 1) for count, ms in best.items()}
            rows.append(
                {"model": model, "rows": num_rows, "step_ms": times, "times_as_fast": ratios, "step_gb_s": speeds}
            )
            print(json.dumps(rows[-1]), flush=True)
    save(
        args.json,
        conditions,
        {"instruction_set": library.instruction_set, "rounds": ROUNDS, "read_gb_s": read, "rows": rows},
    )


if __name__ == "__main__":
    main()
