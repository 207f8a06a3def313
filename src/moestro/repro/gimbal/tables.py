"""The tables of Gimbal's experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from moestro.repro.gimbal.findings import FIGURES, GimbalFindings
from moestro.repro.gimbal.paper import GimbalPart
from moestro.repro.gimbal.systems import SYSTEMS

_CAPTION = "simulated; means over seeds; in brackets the change from the first system, over the seeds of both"


def tables_of(parts: Mapping[str, GimbalPart], findings: GimbalFindings) -> Iterator[RenderableType]:
    """A table for each part, setting and rate, the prefix hits, then a line about each system."""
    for load in findings.loads:
        for setting in findings.settings(load):
            for rate in findings.rates(load):
                table = _latencies(parts[load], findings, rate, setting)
                if table.row_count:
                    yield table
    yield from (_prefixes(parts[load], findings) for load in dict.fromkeys(each.load for each in findings.prefixes))
    for load, about in findings.about_lengths.items():
        yield f"{load}: lengths {about}"
    for name in dict.fromkeys(name for load in parts for name in parts[load].systems):
        yield f"{name}: {SYSTEMS[name].about}"


def _latencies(part: GimbalPart, findings: GimbalFindings, rate: float, setting: str) -> Table:
    level = findings.levels.get(f"{part.name} {setting}".strip())
    title = f"{part.name} {setting}, {rate:g} requests/s" + (f", {part.finds} {level:g}" if level else "")
    table = Table(
        "system", *FIGURES, "plans", "moved, GB", "stalls, ms", "balance", "branches", title=title, caption=_CAPTION
    )
    base = findings.of(part.name, rate, part.systems[0], setting)
    for system in part.systems:
        cells = findings.of(part.name, rate, system, setting)
        if not cells:
            continue
        row = []
        for name, of in FIGURES.items():
            change = findings.change(name, cells, base)
            shown = "" if change is None or system == part.systems[0] else f" ({change:+.1%})"
            row.append(f"{np.mean([of(cell) for cell in cells]):.4g}{shown}")
        first = cells[0]
        branches = ", ".join(f"{name} {count}" for name, count in sorted(first.branches.items()))
        table.add_row(
            system, *row, f"{first.num_plans}", f"{first.moved_gb:.1f}", f"{first.stall_ms:.0f}",
            f"{first.balance:.3f}" if first.balance else "", branches,
        )  # fmt: skip
    return table


def _prefixes(part: GimbalPart, findings: GimbalFindings) -> Table:
    numbers = sorted({each.run for each in findings.prefixes if each.load == part.name})
    table = Table(
        "system", *(f"run {number}" for number in numbers), "mean hits", "hit rate",
        title=f"{part.name}: blocks of 16 tokens found in the prefix caches, of the same requests in each run",
        caption="simulated",
    )  # fmt: skip
    for system in part.systems:
        runs = [each for each in findings.prefixes if (each.load, each.system) == (part.name, system)]
        hits = [each.hit_blocks for each in sorted(runs, key=lambda each: each.run)]
        rate = np.mean([each.hit_rate for each in runs])
        table.add_row(system, *(f"{each:,}" for each in hits), f"{np.mean(hits):,.0f}", f"{rate:.2%}")
    return table
