"""Measures the speed of simulated groups whose tokens draw their experts: `async`, ideal `ep` and Gimbal's ranks.

    OMP_NUM_THREADS=1 python bench/simulator/group_speed.py --json bench/results/simulator/group_speed.json

The load is that of AMoE's comparison of schedulers at 80 % (`moestro repro amoe`, part schedulers_top1_permuted):
Mixtral with multi-query attention and top-1 on four attention and four expert workers. The rate and the number of
requests at the start are read from the stored result. `num_items` are those of attention workers and of expert
workers. Gimbal's ranks serve 100 requests of its part scarce_random (Qwen3-30B-A3B, two ranks, top-8 of 128).

Each runs with compiled draws and with NumPy's, which are equal. All of them and the repeats take turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.cost.gate import gate_kernel
from moestro.repro.amoe.loads import LENGTHS, open_load, serve_open
from moestro.repro.amoe.paper import WHOLE
from moestro.repro.amoe.systems import ASYNC, EP, build
from moestro.repro.gimbal.loads import RunName, fitting, serve, shaped_load
from moestro.repro.gimbal.paper import HIGH, whole
from moestro.repro.gimbal.systems import BLOCK_SIZE, GIMBAL_V1

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

PART = next(part for part in WHOLE if part.name == "schedulers_top1_permuted")
STORED = Path(__file__).parents[1] / "results/repro/amoe.json"
REPEATS, BEGIN_S, STOP_S, SEED = 5, 1.0, 5.0, 0
NUM_REQUESTS = 100  # of Gimbal's load
COMPILED, NUMPY = "compiled", "numpy"  # whose code draws


def stored_load() -> tuple[float, int]:
    """Requests a second at 80 % of what `async` reaches, and the requests that are in progress at the start."""
    cells = json.loads(STORED.read_text())["findings"]["cells"]
    found = [cell for cell in cells if cell["load"] == PART.name and cell["system"] == ASYNC]
    (cell,) = [cell for cell in found if cell["rate"] not in PART.rates]
    return cell["rate"], cell["num_first"]


Figures = dict[str, object]


def of_amoe(system: str) -> Callable[[], tuple[float, Figures]]:
    """Return a run of a system under AMoE's load, which gives its CPU-seconds a simulated second and its figures."""
    lengths, (rate, num_first) = LENGTHS[PART.lengths], stored_load()
    load = open_load(lengths, rate, STOP_S, num_first, SEED)

    def run() -> tuple[float, Figures]:
        built = build(system, PART.bed, (lengths.mean_context, lengths.longest), SEED)
        began = time.process_time()
        seen = serve_open(built, load, BEGIN_S, STOP_S)
        num_items = None if built.tallies is None else [tally.num_items for tally in built.tallies]
        return (time.process_time() - began) / STOP_S, {
            "rate": rate,
            "num_first": num_first,
            "simulated_s": STOP_S,
            "tokens_per_s": round(seen.tokens_per_s),
            "num_items": num_items,
        }

    return run


def of_gimbal() -> tuple[float, Figures]:
    """Run Gimbal's Algorithms 1 to 3; return the CPU-seconds a simulated second and the figures."""
    part = next(each for each in whole(NUM_REQUESTS) if each.name == "scarce_random")
    assert part.bed.num_blocks is not None
    load = shaped_load(None, part.shape, NUM_REQUESTS, HIGH, SEED)
    load = replace(load, rows=fitting(load.rows, part.bed.num_blocks * BLOCK_SIZE))
    began = time.process_time()
    cell = serve(part.bed, load, RunName(load=part.name, rate=HIGH, system=GIMBAL_V1, seed=SEED))
    simulated_s = float(load.rows.num_output_tokens.sum()) / cell.tokens_per_s
    return (time.process_time() - began) / simulated_s, {
        "num_requests": NUM_REQUESTS,
        "simulated_s": round(simulated_s, 1),
        "tokens_per_s": round(cell.tokens_per_s),
        "step_ms": round(cell.step_ms, 3),
    }


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions = run_record("measured")
    assert gate_kernel.search().wait(), gate_kernel.search().failure
    runs = {"async": of_amoe(ASYNC), "ep": of_amoe(EP), "gimbal": of_gimbal}
    cpu_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    figures: dict[str, Figures] = {}
    for _ in range(REPEATS):
        for name, run in runs.items():
            for draws, context in ((COMPILED, nullcontext), (NUMPY, gate_kernel.left_out)):
                with context():
                    seconds, found = run()
                cpu_s[name, draws].append(seconds)
                assert figures.setdefault(name, found) == found, "a run is the same each time, with either code"
    for name, found in figures.items():
        found["cpu_s_per_simulated_s"] = {draws: spread(cpu_s[name, draws]) for draws in (COMPILED, NUMPY)}
        pairs = zip(cpu_s[name, COMPILED], cpu_s[name, NUMPY], strict=True)
        found["compiled_over_numpy"] = spread([ours / theirs for ours, theirs in pairs])
    print(json.dumps(figures, indent=1))
    save(args.json, conditions, {"repeats": REPEATS} | figures)


if __name__ == "__main__":
    main()
