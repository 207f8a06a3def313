"""Tables of docs/accuracy.md, made of the stored results of bench/accuracy, and that of engines with host memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from moestro.core.rng import student_t_quantile

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))
from accuracy.loads import LOADS  # noqa: E402 (no package)

RESULTS = BENCH / "results" / "accuracy"
TITLES = {
    "ttft_mean_ms": "TTFT mean",
    "ttft_p99_ms": "TTFT P99",
    "tpot_mean_ms": "TPOT mean",
    "tokens_per_s": "tokens/s",
}
HITS = "hit_ratio"


def stored() -> dict[str, dict[str, Any]]:
    """The stored results by system."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def _interval(errors: list[float]) -> tuple[float, float]:
    """Mean error over seeds, and half of its 95 % interval."""
    half = student_t_quantile(0.975, len(errors) - 1) * stdev(errors) / len(errors) ** 0.5
    return fmean(errors), half


def _cell(rows: list[dict[str, Any]], figure: str) -> str:
    measured = fmean(row["measured"][figure] for row in rows)
    if figure == HITS:
        mean, half = _interval([100 * (row["predicted"][figure] - row["measured"][figure]) for row in rows])
        return f"{measured:.3f}: {mean:+.1f} ± {half:.1f} points"
    mean, half = _interval([100 * (row["predicted"][figure] / row["measured"][figure] - 1) for row in rows])
    return f"{measured:,.1f}: {mean:+.0f} ± {half:.0f} %"


def accuracy_table() -> str:
    """Errors of all systems and loads: the measured mean, and the error of its prediction. Equal cells stay empty."""
    shown = ""
    lines = [f"| system | load | {' | '.join(TITLES.values())} | hit ratio |", "|---" * (len(TITLES) + 3) + "|"]
    for result in stored().values():
        loads = dict.fromkeys(row["load"] for row in result["rows"])
        for load in loads:
            rows = [row for row in result["rows"] if row["load"] == load]
            cells = [_cell(rows, figure) for figure in (*TITLES, HITS)]
            system, shown = ("" if result["system"] == shown else result["system"]), result["system"]
            lines.append(f"| {system} | {load} | {' | '.join(cells)} |")
    return "\n".join(lines)


def estimates_table() -> str:
    """What calibrate found of each quantity, by system, with intervals."""
    results = list(stored().values())
    lines = [f"| quantity | {' | '.join(result['system'] for result in results)} |", "|---" * (len(results) + 1) + "|"]
    by_title: dict[str, list[str]] = {}
    for result in results:
        for each in result["estimates"]:
            by_title.setdefault(each["title"], []).append(_estimate(each))
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in by_title.items()]
    return "\n".join(lines)


def _estimate(each: dict[str, Any]) -> str:
    """An estimate with its interval, or with the reason why it has none."""
    unit, why = each["unit"], each["why"]
    number = ",.4g" if unit else ",.0f"
    if each["value"] is None:
        least = "" if each["low"] is None else f"at least {each['low']:{number}}; "
        return f"not identified: {least}{why}"
    value = f"{each['value']:{number}} {unit}".rstrip()
    exact = "lower limit" if unit and not each["value"] else why or "exact"
    words = exact if each["low"] == each["high"] else f"{each['low']:{number}} to {each['high']:{number}}"
    return f"{value} ({words})"


def summary_table() -> str:
    """Mean absolute errors of each system over its loads and seeds, and how many of its runs had a late client."""
    lines = [f"| system | loads | late | {' | '.join(TITLES.values())} | hit ratio |", "|---" * (len(TITLES) + 4) + "|"]
    for result in stored().values():
        rows = result["rows"]
        num_late = sum(not row["client_is_valid"] for row in rows)
        cells = [f"{len({row['load'] for row in rows})} of {len(LOADS)}", f"{num_late} of {len(rows)}"]
        for figure in TITLES:
            errors = [abs(row["predicted"][figure] / row["measured"][figure] - 1) for row in rows]
            cells.append(f"{100 * fmean(errors):.0f} %, at most {100 * max(errors):.0f}")
        points = [100 * abs(row["predicted"][HITS] - row["measured"][HITS]) for row in rows]
        cells.append(f"{fmean(points):.1f} points, at most {max(points):.1f}")
        lines.append(f"| {result['system']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def host_memory_table() -> str:
    """Return TTFT, hits and throughput of engines on a CPU by model, live KV and host memory."""
    models = {}
    for name in ("host_tier", "host_tier_640m"):
        models |= json.loads((RESULTS.parent / "serving" / f"{name}.json").read_text())["models"]
    columns = ["model", "live KV", "host memory", "mean TTFT, ms", "simulated", "P99, ms", "simulated", "over none"]
    columns += ["simulated", "hits on the device, on the host", "tokens/s"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model, found in models.items():
        without = {case["tool_s"]: case for case in found["cases"] if not case["host memory"]}
        for case in found["cases"]:
            measured, simulated = case["measured"], case["simulated"]
            low, high = case["ttft_range_ms"]
            none = without[case["tool_s"]]
            over = (
                f"{case[side]['ttft_mean_ms'] / none[side]['ttft_mean_ms']:.2f}" for side in ("measured", "simulated")
            )
            cells = [
                model,
                f"{case['live_kv']:.1f}",
                str(case["host memory"]),
                f"{_round(measured['ttft_mean_ms'])} ({_round(low)} to {_round(high)})",
                f"{_round(simulated['ttft_mean_ms'])}, {case['ttft_error']:+.0%}".replace("%", " %"),
                _round(measured["ttft_p99_ms"]),
                _round(simulated["ttft_p99_ms"]),
                *over,
                f"{measured['device_hits']:.0%}, {measured['host_hits']:.0%}".replace("%", " %"),
                f"{measured['tokens_per_s']:.1f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    errors = [case["ttft_error"] for found in models.values() for case in found["cases"]]
    ends = f"{min(errors):+.0%} to {max(errors):+.0%}".replace("%", " %")
    return "\n".join([*lines, "", f"Errors of the simulated mean TTFT are {ends}."])


def _round(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"
