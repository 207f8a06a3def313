"""Shows what is left of a placement's balance in the next window, as it is and with the shares of its copies set anew.

    python bench/simulator/placement_windows.py [--seeds 5] [--json bench/results/simulator/placement_windows.json]

Everything is computed, so a run repeats its figures exactly. A policy plans from vLLM's placement of the start; the
next windows have 10 % lognormal noise of each expert. *refreshed* keeps the placement and lets `moestro` divide the
tokens of each window among the copies, for no move. Loads are Zipf's law with jitter, and a mix of four kinds of tasks
of which each has 60 % of its popularity for itself.

*estimate* is about what placement alone can reach, for any policy: the noise of all devices is alike and normal, it has
the least variance that numbers of copies allow with equal shares, and in the window of the plan all loads are equal.
Devices that share experts become heavier together, which the estimate counts as their mean covariance.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moestro.config.run_record import run_record
from moestro.core.experts.expert_load import ExpertLoad
from moestro.core.experts.expert_table import ExpertTable
from moestro.placement.contract import PLACE_POLICIES, PlaceView
from moestro.placement.score import score

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import placement_loads as loads
from placement_loads import DEEPSEEK_V3, Bed
from shared.results import make_parser, save

BEDS = (Bed(DEEPSEEK_V3, 32, 9, 4), Bed(DEEPSEEK_V3, 64, 5, 8))
EXPONENTS = (0.2, 0.4, 0.6, 0.8, 1.2)
MIX = "four kinds of tasks"
POLICIES = ("eplb:hierarchy=never", "moestro:weighted=0", "moestro")
ESTIMATE = "(estimate)"
NUM_WINDOWS = 4  # next windows of each seed
NUM_DRAWS = 400  # of the noise of all devices, for the estimate of a layer
Figures = dict[str, float]


def load_of(name: str, bed: Bed, rng: np.random.Generator) -> ExpertLoad:
    """Draw a load by name."""
    if name == MIX:
        return loads.from_clusters(bed, 0.0, rng)
    return loads.from_every_source(loads.zipf(bed.model, float(name.removeprefix("s=")), rng), bed)


def balance(view: PlaceView, table: ExpertTable, load: ExpertLoad) -> float:
    return score(load, table, view.devices, view.prices).mean_balance


def refreshed(view: PlaceView, table: ExpertTable, load: ExpertLoad) -> ExpertTable:
    """Return the placement with shares for another load; no copy moves."""
    limits = replace(view.limits, max_receives=0)
    return PLACE_POLICIES.make("moestro")(replace(view, table=table, load=load, limits=limits))


def estimate(view: PlaceView, rng: np.random.Generator) -> float:
    """Return about the best mean balance of the next window that a placement with equal shares reaches."""
    total, num_devices = view.load.total, view.devices.num_devices
    counts, every = np.ones(total.shape), np.arange(len(total))
    for _ in range(int(view.devices.num_slots.sum()) - total.shape[1]):
        # The copy that lowers the sum of the squares of what devices get by the most.
        most = (total**2 / (counts * (counts + 1))).argmax(axis=1)
        counts[every, most] += 1
    own = (total**2 / counts).sum(axis=1)
    common = ((total**2).sum(axis=1) - own) / (num_devices - 1)  # covariances of a device with another one
    spread = loads.NEXT_SIGMA * np.sqrt((own - common) * num_devices) / total.sum(axis=1)
    noisy = 1 + spread[:, None, None] * rng.standard_normal((len(total), NUM_DRAWS, num_devices))
    return float((noisy.mean(axis=2) / noisy.max(axis=2)).mean())


def run(bed: Bed, name: str, seed: int) -> dict[str, Figures]:
    """Plan with each policy, and score the plans under the next windows."""
    rng = np.random.default_rng([8, seed])
    view = bed.view(load_of(name, bed, rng))
    following = [loads.with_noise(view.load, rng) for _ in range(NUM_WINDOWS)]
    found: dict[str, Figures] = {ESTIMATE: {"next": estimate(view, rng)}}
    for policy in POLICIES:
        table = PLACE_POLICIES.make(policy)(view)
        found[policy] = {
            "planned": balance(view, table, view.load),
            "next": statistics.mean(balance(view, table, load) for load in following),
            "refreshed": statistics.mean(balance(view, refreshed(view, table, load), load) for load in following),
        }
    return found


def spread_of(runs: list[Figures]) -> dict[str, list[float]]:
    """Return mean, minimum and maximum over the seeds of each figure."""
    of = (statistics.mean, min, max)
    return {name: [round(each([run[name] for run in runs]), 4) for each in of] for name in runs[0]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 190)
    conditions = run_record("simulated", "balance is computed with the traffic model")
    names = [*(f"s={exponent:g}" for exponent in EXPONENTS), MIX]
    cases = [(bed, name) for bed in BEDS for name in names]
    rows: list[dict[str, object]] = []
    for bed, name in track(cases, "windows", console=console, auto_refresh=False, transient=True):
        runs = [run(bed, name, seed) for seed in range(args.seeds)]
        for policy in runs[0]:
            figures = spread_of([each[policy] for each in runs])
            rows.append({"case": bed.name, "load": name, "policy": policy} | figures)
    show(console, rows)
    save(args.json, conditions, {"seeds": args.seeds, "rows": rows})


def show(console: Console, rows: list[dict[str, object]]) -> None:
    def cell(spread: list[float]) -> str:
        mean, least, most = spread
        return f"{mean:.4f} ({least:.4f}, {most:.4f})"

    table = Table(title="balance (SGLang's): mean, least and most of the seeds", title_justify="left")
    for heading in ("case", "load", "policy", "planned", "next", "refreshed"):
        table.add_column(heading)
    for row in rows:
        figures = (cell(row[name]) if name in row else "" for name in ("planned", "next", "refreshed"))
        table.add_row(str(row["case"]), str(row["load"]), str(row["policy"]), *figures)
    console.print(table)


if __name__ == "__main__":
    main()
