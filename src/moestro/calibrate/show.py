"""Prints the table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table as Rows

from moestro.cost.tables import Table


def print_table(console: Console, table: Table, errors: Sequence[float]) -> None:
    """Print the grids in milliseconds, the rank's own work, and the errors on other shapes."""
    prefill = {(point.new, point.cached): point.ns for point in table.prefill}
    decode = {(point.sequences, point.context): point.ns for point in table.decode}
    console.print(_grid("one prefill chunk, ms", "new tokens", "cached", prefill))
    short = {(point.tokens, point.chunk): point.ns for point in table.short_chunks}
    console.print(_grid("short prefill chunks, ms", "tokens", "in chunks of", short))
    console.print(_grid("decodes, ms", "sequences", "mean context", decode))
    sizes = np.abs(errors)
    spreads = [point.spread for point in table.prefill] + [point.spread for point in table.decode]
    for name, text in (
        (
            "rank's work",
            "{:.0f} us a step, {:.1f} us a sequence and {:.0f} us a chunk".format(
                *(ns / 1e3 for ns in msgspec.structs.astuple(table.host))
            ),
        ),
        ("spread", f"{np.median(spreads):.1%} of the median between repeats (interquartile, median of all points)"),
        (
            "other shapes",
            f"{len(errors)} batches priced with a mean error of {sizes.mean():.1%}, {sizes.max():.1%} at most",
        ),
    ):
        console.print(f"{name:<14} {text}", markup=False, highlight=False, soft_wrap=True)


def _grid(title: str, row_name: str, column_name: str, ns: dict[tuple[int, int], float]) -> Rows:
    columns = sorted({column for _, column in ns})
    shown = Rows(title=title, title_justify="left")
    shown.add_column(row_name, justify="right")
    for column in columns:
        shown.add_column(f"{column_name} {column}", justify="right")
    for row in sorted({row for row, _ in ns}):
        cells = [f"{ns[row, column] / 1e6:.2f}" if (row, column) in ns else "" for column in columns]
        shown.add_row(str(row), *cells)
    return shown
