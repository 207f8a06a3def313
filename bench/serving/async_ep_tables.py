"""Prints the result of `async_ep.py` as Markdown tables: `python bench/serving/async_ep_tables.py RESULT.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

_FIGURES = {
    "tokens_per_s": "tokens/s",
    "itl_mean_ms": "ITL mean, ms",
    "itl_p99_ms": "ITL P99, ms",
    "ttft_mean_ms": "TTFT mean, ms",
    "stall_engines": "stall, attention",
    "stall_experts": "stall, experts",
}


def measured_table(result: dict) -> Iterable[str]:
    """Yield the lines of the measured systems: medians with least and most."""
    columns = ["tokens_per_s", "ttft_mean_ms", "itl_mean_ms", "itl_p99_ms", "cpu_ms_per_token"]
    columns += ["cpu_ms_per_token_over_fused", "messages_per_token", "kib_per_token"]
    yield "| system | " + " | ".join([*(name.replace("_", " ") for name in columns), "stall of each worker"]) + " |"
    yield "|---" * (len(columns) + 2) + "|"
    for row in result["measured"]["summary"]:
        cells = [_spread(row[name]) if name in row else "" for name in columns]
        stalls = ", ".join(f"{name} {share['median']:.0%}" for name, share in row.get("stall_shares", {}).items())
        yield f"| {row['system']} | " + " | ".join([*cells, stalls]) + " |"


def paced_table(result: dict) -> Iterable[str]:
    """Yield the lines of the paced runs: paced / simulated (difference)."""
    yield "| mode, gate, dilation | lateness | " + " | ".join(_FIGURES.values()) + " |"
    yield "|---" * (len(_FIGURES) + 2) + "|"
    for row in result["compared"]:
        late = f"{row['worst_late_share']:.1%}" + ("" if row["is_valid"] else " **invalid**")
        cells = [_pair(name, row[name]) if name in row else "" for name in _FIGURES]
        yield f"| {row['mode']}, {row['gate']}, {row['dilation']:g} | {late} | " + " | ".join(cells) + " |"


def host_table(result: dict) -> Iterable[str]:
    """Yield the host's microseconds for an item, which are not dilated."""
    keys = ("elapsed_us", "late_us", "own_us", "main_cpu_us", "transport_cpu_us")
    yield "| mode, gate, dilation | item of | items | " + " | ".join(key.replace("_", " ") for key in keys) + " |"
    yield "|---" * (len(keys) + 3) + "|"
    for row in (*result["host"]["runs"], *result["paced_rows"]):
        for kind, host in row["host"].items():
            cells = [f"{host[key]:.0f}" for key in keys]
            name = f"{row['mode']}, {row['gate']}, {row['dilation']:g}"
            yield f"| {name} | {kind} | {host['num_items']:.0f} | " + " | ".join(cells) + " |"


def forecast_table(result: dict) -> Iterable[str]:
    """Yield the simulated figures with a host that no dilation divides, and that is never late."""
    yield "| mode, gate | tokens/s | ITL mean, ms | ITL P99, ms |"
    yield "|---|---|---|---|"
    for row in result["forecast"]:
        itl = row["itl_ms"]
        yield f"| {row['mode']}, {row['gate']} | {row['tokens_per_s']:.0f} | {itl['mean']:.1f} | {itl['p99']:.1f} |"


def _spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.3g} ({figure['min']:.3g} to {figure['max']:.3g})"


def _pair(name: str, figure: dict[str, float]) -> str:
    form = ".1%" if name.startswith("stall") else ".1f"
    return f"{figure['paced']:{form}} / {figure['simulated']:{form}} ({figure['difference']:+.1%})"


def print_tables(result: dict) -> None:
    """Print all tables of a result."""
    for table in (measured_table, paced_table, host_table, forecast_table):
        print("\n" + "\n".join(table(result)))


if __name__ == "__main__":
    print_tables(json.loads(Path(sys.argv[1]).read_text()))
