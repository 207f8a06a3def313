"""Measures the speed of simulated `async` groups in CPU-seconds per simulated second, with ideal `ep` beside it.

    OMP_NUM_THREADS=1 python bench/simulator/group_speed.py --json bench/results/simulator/group_speed.json

The load is that of AMoE's comparison of schedulers at 80 % (`moestro repro amoe`, part schedulers_top1_permuted):
Mixtral with multi-query attention and top-1 on four attention and four expert workers. The rate and the number of
requests at the start are read from the stored result. Systems and repeats take turns. `num_items` are those of
attention workers and of expert workers.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

from moestro.config.run_record import run_record
from moestro.repro.amoe.loads import LENGTHS, open_load, serve_open
from moestro.repro.amoe.paper import WHOLE
from moestro.repro.amoe.systems import ASYNC, EP, build

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save, spread

PART = next(part for part in WHOLE if part.name == "schedulers_top1_permuted")
STORED = Path(__file__).parents[1] / "results/repro/amoe.json"
REPEATS, BEGIN_S, STOP_S, SEED = 5, 1.0, 5.0, 0


def stored_load() -> tuple[float, int]:
    """Requests a second at 80 % of what `async` reaches, and the requests that are in progress at the start."""
    cells = json.loads(STORED.read_text())["findings"]["cells"]
    found = [cell for cell in cells if cell["load"] == PART.name and cell["system"] == ASYNC]
    (cell,) = [cell for cell in found if cell["rate"] not in PART.rates]
    return cell["rate"], cell["num_first"]


def main() -> None:
    args = make_parser(__doc__).parse_args()
    conditions = run_record("measured")
    lengths, (rate, num_first) = LENGTHS[PART.lengths], stored_load()
    load = open_load(lengths, rate, STOP_S, num_first, SEED)
    cpu_s: dict[str, list[float]] = defaultdict(list)
    found: dict[str, object] = {"rate": rate, "num_first": num_first, "simulated_s": STOP_S, "repeats": REPEATS}
    for _ in range(REPEATS):
        for system in (ASYNC, EP):
            built = build(system, PART.bed, (lengths.mean_context, lengths.longest), SEED)
            began = time.process_time()
            seen = serve_open(built, load, BEGIN_S, STOP_S)
            cpu_s[system].append((time.process_time() - began) / STOP_S)
            found[system] = {
                "cpu_s_per_simulated_s": spread(cpu_s[system]),
                "tokens_per_s": round(seen.tokens_per_s),
                "num_items": None if built.tallies is None else [tally.num_items for tally in built.tallies],
            }
    print(json.dumps(found, indent=1))
    save(args.json, conditions, found)


if __name__ == "__main__":
    main()
