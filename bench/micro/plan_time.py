"""Measures what a placement plan takes: `moestro` with its compiled kernel and without, and vLLM's EPLB, in one run.

    OMP_NUM_THREADS=1 python bench/micro/plan_time.py --vllm SITE_PACKAGES [--json bench/results/micro/plan_time.json]

SITE_PACKAGES holds the package `vllm`. Plans are for the same loads, from vLLM's placement of the start, and in turn.
Loads are Zipf 0.6, from all sources alike, or from sources nine tenths of whose tokens have tasks of their node's kind.
Times are milliseconds of processor time with one thread; `process_ms` has those of all threads of the process, which
shows that there is no other one. NumPy's code plans once a case, because it takes a second and more.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from moestro.config.run_record import run_record
from moestro.placement.contract import PLACE_POLICIES
from moestro.placement.kernel.choice import placement_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "simulator"))
import placement_loads as loads
from placement_loads import DEEPSEEK_V3, QWEN3_30B, Bed
from shared.results import make_parser, save, spread

BEDS = (
    Bed(DEEPSEEK_V3, 32, 9, 4),
    Bed(DEEPSEEK_V3, 64, 5, 8),
    Bed(DEEPSEEK_V3, 144, 2, 18),
    Bed(QWEN3_30B, 8, 18, 1),
    Bed(QWEN3_30B, 8, 16, 1),
)
WHERE_SOURCES_DIFFER = (Bed(DEEPSEEK_V3, 32, 9, 4), Bed(DEEPSEEK_V3, 64, 5, 8), Bed(QWEN3_30B, 8, 18, 2))
STICKY = 0.9
KERNEL, NUMPY, VLLM = "moestro", "moestro, NumPy", "vLLM"


def milliseconds(plan: Callable[[], object]) -> tuple[float, float]:
    """Return processor time of this thread, and of all threads."""
    thread, process = time.thread_time(), time.process_time()
    plan()
    return 1e3 * (time.thread_time() - thread), 1e3 * (time.process_time() - process)


def without(plan: Callable[[], object]) -> Callable[[], object]:
    """Let NumPy's code plan."""

    def by_numpy() -> object:
        with placement_kernel.left_out():
            return plan()

    return by_numpy


def vllm_policy(folder: Path) -> type:
    import torch  # noqa: PLC0415 (vLLM's function needs it, and the bench without it does not)
    from shared import eplb_peers  # noqa: PLC0415

    torch.set_num_threads(1)
    return eplb_peers.vllm(folder)


def run(bed: Bed, num_seeds: int, repeats: int, peer: type | None, *, differ: bool) -> list[dict[str, object]]:
    """Plan all loads of a case with each function.

    Args:
        differ: Whether sources send different mixes.
    """
    spent: dict[str, list[tuple[float, float]]] = {}
    for seed in range(num_seeds):
        rng = np.random.default_rng([0, seed])
        alike = None if differ else loads.from_every_source(loads.zipf(bed.model, 0.6, rng), bed)
        view = bed.view(alike or loads.from_clusters(bed, STICKY, rng))
        policy = PLACE_POLICIES.make("moestro")
        plans: dict[str, Callable[[], object]] = {KERNEL: lambda p=policy, v=view: p(v)}
        if peer is not None:
            import torch  # noqa: PLC0415

            weight, sizes = torch.from_numpy(view.load.total), (bed.num_devices * bed.num_slots, 1, 1, bed.num_devices)
            plans[VLLM] = lambda w=weight, s=sizes: peer.rebalance_experts(w, *s)
        for turn in range(repeats + 1):
            for name, plan in plans.items():
                found = milliseconds(plan)
                if turn:  # the first one warms up
                    spent.setdefault(name, []).append(found)
        if seed == 0:
            spent[NUMPY] = [milliseconds(without(plans[KERNEL]))]
    rows = []
    for name, times in spent.items():
        ms, process_ms = zip(*times, strict=True)
        case = bed.name + (", sources differ" if differ else "")
        row = {"case": case, "function": name, "plans": len(times), "ms": spread(list(ms))}
        rows.append(row | {"process_ms": round(statistics.median(process_ms), 3)})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm", type=Path, help="folder with the package vllm")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found = [] if args.vllm is None else [each.name for each in args.vllm.glob("vllm-*.dist-info")]
    note = f"processor time, one thread; vLLM's function plans over all devices ({', '.join(found)})"
    conditions = run_record("measured", note)
    if placement_kernel.search().wait() is None:
        sys.exit(f"the kernel is absent: {placement_kernel.search().failure}")
    peer = None if args.vllm is None else vllm_policy(args.vllm)
    cases = [(bed, False) for bed in BEDS] + [(bed, True) for bed in WHERE_SOURCES_DIFFER]
    rows = [row for bed, differ in cases for row in run(bed, args.seeds, args.repeats, peer, differ=differ)]
    table = Table(title="milliseconds of a plan, one thread")
    for heading in ("case", "function", "median", "least", "most"):
        table.add_column(heading)
    for row in rows:
        table.add_row(str(row["case"]), str(row["function"]), *(f"{each:.1f}" for each in row["ms"].values()))
    Console().print(table)
    save(args.json, conditions, {"threads": 1, "rows": rows})


if __name__ == "__main__":
    main()
