"""Shows how evenly ranks with few tokens divide them among the copies of an expert, by `core.visit_order`.

    python bench/simulator/placement_dispatch.py [--json bench/results/simulator/placement_dispatch.json]

Everything is computed. A layer has experts with 2 to 8 copies of equal shares, and every rank visits each expert with
one token, or with one in each of eight steps. *most* is the most visits of a copy over the mean of its expert's copies.
*least possible* is the same where ranks divide their visits as evenly as whole visits allow. *alike* is that of ranks
which all begin with the first copy and then take turns, as where a token's place in the batch chooses the copy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from moestro.config.run_record import run_record
from moestro.model.experts.spread_device import visit_orders

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared.results import make_parser, save

NUM_RANKS = (32, 64)
NUM_COPIES = tuple(range(2, 9))
NUM_STEPS = (1, 8)  # of a token each
Row = dict[str, object]


def figures_of(num_ranks: int, num_steps: int) -> list[Row]:
    """Send a token of each rank and step to every expert; return a row for each number of copies."""
    parts = np.zeros((len(NUM_COPIES), max(NUM_COPIES)))
    for row, num_copies in enumerate(NUM_COPIES):
        parts[row, :num_copies] = 1 / num_copies
    visits, every = np.zeros(parts.shape, np.int64), np.arange(len(parts))
    for rank in range(num_ranks):
        order, period = visit_orders(parts, rank)
        for step in range(num_steps):
            visits[every, order[every, step % period]] += 1
    rows: list[Row] = []
    for row, num_copies in enumerate(NUM_COPIES):
        mean = num_ranks * num_steps / num_copies
        most = {
            "most": int(visits[row].max()),
            "least_possible": -(-num_ranks * num_steps // num_copies),
            "alike": num_ranks * -(-num_steps // num_copies),
        }
        shown = {name: round(each / mean, 3) for name, each in most.items()}
        rows.append({"ranks": num_ranks, "tokens": num_steps, "copies": num_copies} | shown)
    return rows


def main() -> None:
    args = make_parser(__doc__).parse_args()
    rows = [row for num_ranks in NUM_RANKS for num_steps in NUM_STEPS for row in figures_of(num_ranks, num_steps)]
    show(Console(width=None if sys.stdout.isatty() else 190), rows)
    save(args.json, run_record("simulated"), {"rows": rows})


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title="most visits of a copy over the mean", title_justify="left")
    for heading in ("ranks", "tokens of each", "copies", "most", "least possible", "alike"):
        table.add_column(heading)
    for row in rows:
        table.add_row(*(str(each) for each in row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
