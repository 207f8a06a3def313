"""Compares plans that are followed where they last with never moving, one plan, and EPLB at each interval.

    python bench/simulator/placement_lasting.py --routing DIR --first-seed 1 --seeds 5 \
        --json bench/results/simulator/placement_lasting.json

The constants of `placement/payback.py` were chosen on seeds from 100 on, so score on lower ones.

Loads are recorded choices of GPT-OSS-20B (DIR holds the two files of the trace); each window has half of a benchmark's
answers, drawn anew, so windows of one benchmark differ as answers do. *stays*: one benchmark; *alternates*: two, which
take turns at each interval; *drifts*: two, of which the second one's part grows from window to window; *changes once*:
the second one from the seventh window on. A plan is made at the end of a window from its load, and serves the next one.
Seconds are priced: all intervals with their moves, by the traffic model, as on H100 with NVSwitch. The second plain way
plans once, at the second window, for the mean of both that it has seen. Layers are cut to save time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moestro.config.run_record import run_record
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.contract import PLACE_POLICIES, PlaceLimits, PlacePolicy, PlaceView
from moestro.placement.kernel.choice import placement_kernel
from moestro.placement.payback import LastingPlans, mean_load
from moestro.placement.score import move_s, moves_between, score
from moestro.workload.experts.expert_profile import RoutingTrace

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import placement_loads as loads
from placement_loads import GPT_OSS_20B, Bed
from shared.results import make_parser, save

NUM_LAYERS = 6
STEPS = 3000.0  # of an interval, as in vLLM
NUM_WINDOWS = 12
BEDS = tuple(
    Bed(replace(GPT_OSS_20B, num_layers=NUM_LAYERS), 8, slots, 2, rows_per_source=rows)
    for slots, rows in ((5, 256), (5, 8192), (8, 2048))
)
FIRST, SECOND = "gpqa_main", "mmlu_validation"
KINDS: dict[str, Callable[[int], float]] = {  # part of the second benchmark in each window
    "stays": lambda nth: 0.0,
    "drifts": lambda nth: nth / (NUM_WINDOWS - 1),
    "alternates": lambda nth: float(nth % 2),
    "changes once": lambda nth: float(nth >= NUM_WINDOWS // 2),
}
LIVE, PLAIN = "lasting moestro", ("never", "one plan", "eplb each interval")


def window(trace: RoutingTrace, bed: Bed, part: float, rng: np.random.Generator) -> ExpertLoad:
    """Draw half of the answers of both benchmarks, and mix them."""
    tokens = np.zeros((bed.num_devices, bed.model.num_layers, bed.model.num_experts))
    for domain, weight in ((FIRST, 1 - part), (SECOND, part)):
        if weight:
            drawn = next(loads.windows(trace, domain, bed, int(rng.integers(2**31))))
            tokens += weight * drawn.tokens
    return loads.load_of(tokens)


def one_plan() -> PlacePolicy:
    """Return a policy that plans at the second window, for the mean of those that it has seen."""
    seen: list[ExpertLoad] = []
    decide = PLACE_POLICIES.make("moestro")

    def once(view: PlaceView) -> ExpertTable:
        seen.append(view.load)
        if len(seen) != 2:
            return view.table
        return decide(replace(view, load=mean_load(seen, np.full(2, 0.5))))

    return once


def play(bed: Bed, following: list[ExpertLoad], policy: PlacePolicy) -> tuple[float, int]:
    """Return the priced seconds of all intervals with their moves, and the migrations."""
    table, devices, prices = bed.first_table(), bed.devices, bed.model.prices
    seconds, num_migrations = 0.0, 0
    for load in following:
        seconds += STEPS * score(load, table, devices, prices).step_s
        view = PlaceView(load, table, devices, prices, PlaceLimits(horizon_steps=STEPS))
        table = policy(view)
        moves = moves_between(view.table, table, devices)
        seconds += move_s(moves, devices, prices)
        num_migrations += len(moves) > 0
    return seconds, num_migrations


def run(trace: RoutingTrace, bed: Bed, kind: str, seed: int) -> dict[str, tuple[float, int]]:
    """Play the same windows with each policy."""
    rng = np.random.default_rng([9, seed])
    following = [window(trace, bed, KINDS[kind](nth), rng) for nth in range(NUM_WINDOWS)]
    policies: dict[str, PlacePolicy] = {
        LIVE: LastingPlans(PLACE_POLICIES.make("moestro")),
        "never": lambda view: view.table,
        "one plan": one_plan(),
        "eplb each interval": PLACE_POLICIES.make("eplb:hierarchy=never"),
    }
    return {name: play(bed, following, policy) for name, policy in policies.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--routing", type=Path, required=True, help="folder of the recorded choices")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="constants were chosen on seeds from 100 on")
    args = parser.parse_args()
    placement_kernel.search().wait()
    conditions, trace = (
        run_record("simulated", "seconds are those of the traffic model"),
        loads.read_trace(args.routing),
    )
    trace = replace(trace, experts=trace.experts[:, :NUM_LAYERS])
    console = Console(width=None if sys.stdout.isatty() else 170)
    rows: list[dict[str, object]] = []
    cases = [(bed, kind) for bed in BEDS for kind in KINDS]
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for bed, kind in track(cases, "lasting plans", console=console, auto_refresh=False, transient=True):
        runs = [run(trace, bed, kind, seed) for seed in seeds]
        ratios = [each[LIVE][0] / min(each[name][0] for name in PLAIN) for each in runs]
        row: dict[str, object] = {"case": bed.name, "rows_per_source": bed.rows_per_source, "load": kind}
        row["of_best_plain"] = [round(each, 4) for each in (statistics.mean(ratios), min(ratios), max(ratios))]
        for name in runs[0]:
            times = [each[name][0] / each["never"][0] for each in runs]
            row[name] = {"of_never": round(statistics.mean(times), 4), "migrations": [each[name][1] for each in runs]}
        rows.append(row)
    show(console, rows)
    measured = {"first_seed": args.first_seed, "seeds": args.seeds, "windows": NUM_WINDOWS, "rows": rows}
    save(args.json, conditions, measured)


def show(console: Console, rows: list[dict[str, object]]) -> None:
    title = "priced seconds as parts of those without moves, and migrations; mean (least, most) of the best plain way"
    table = Table(title=title, title_justify="left")
    names = (LIVE, *PLAIN)
    for heading in ("case", "rows a source", "load", "of the best plain way", *names):
        table.add_column(heading)
    for row in rows:
        mean, least, most = row["of_best_plain"]
        cells = (f"{row[name]['of_never']:.3f}, {row[name]['migrations']}" for name in names)
        ratio = f"{mean:.3f} ({least:.3f}, {most:.3f})"
        table.add_row(str(row["case"]), str(row["rows_per_source"]), str(row["load"]), ratio, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
