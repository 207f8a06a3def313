"""Figures of `async_ep.py`: of one run, of the rounds of a system, and of paced runs beside simulated ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.async_ep_servers import lateness
from serving.async_ep_sim import HostTimes
from shared.results import spread

Row = dict[str, object]
GOAL = 0.1  # largest difference of paced and simulated figures


def measured_figures(found: Row) -> Row:
    """Return the figures of a measured run.

    A worker stalls while nothing can run. Its share is of the time from the first request to the last answer.
    """
    tokens, duration_ns = found["num_tokens"], found["duration_s"] * 1e9
    workers = found["workers"]
    row = {
        "tokens_per_s": tokens / found["duration_s"],
        "ttft_mean_ms": found["ttft_ms"]["mean"],
        "itl_mean_ms": found["itl_ms"]["mean"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "cpu_ms_per_token": sum(sum(times.values()) for times in found["cpu"].values()) / tokens * 1e3,
        "client_late_p99_ms": found["client_late_p99_ms"],
    }
    if workers and all("idle_ns" in each for each in workers.values()):
        row |= {
            "messages_per_token": sum(each["num_sent"] for each in workers.values()) / tokens,
            "kib_per_token": sum(each["sent_bytes"] for each in workers.values()) / tokens / 1024,
            "stall_shares": {
                name: 1 - (each["lived_ns"] - each["idle_ns"]) / duration_ns for name, each in workers.items()
            },
        }
    return row


def measured_summary(rows: list[Row]) -> list[Row]:
    """Summarise the rounds of each system, with ratios to `fused` round by round."""
    found: list[Row] = []
    base = {row["round"]: row for row in rows if row["system"] == "fused"}
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        summary: Row = {"system": system, "rounds": len(own)}
        for figure in own[0]:
            if isinstance(own[0][figure], float):
                summary[figure] = spread([row[figure] for row in own])
        for figure in ("tokens_per_s", "cpu_ms_per_token"):
            summary[f"{figure}_over_fused"] = spread([row[figure] / base[row["round"]][figure] for row in own])
        if "stall_shares" in own[0]:
            summary["stall_shares"] = {
                name: spread([row["stall_shares"][name] for row in own]) for name in own[0]["stall_shares"]
            }
        found.append(summary)
    return found


def paced_figures(found: Row, mode: str, dilation: float) -> Row:
    """Return the figures of a paced run in modelled time, and the host's times as they are."""
    duration_ns, workers = found["duration_s"] * 1e9, found["workers"]
    kinds = {"attention": _of_kind(found, "engine"), "experts": _of_kind(found, "expert worker")}
    return {
        "tokens_per_s": found["num_tokens"] / found["duration_s"] * dilation,
        "duration_s": found["duration_s"] / dilation,
        "ttft_ms": {key: value / dilation for key, value in found["ttft_ms"].items()},
        "itl_ms": {key: value / dilation for key, value in found["itl_ms"].items()},
        "sent_ms": [each / dilation for each in found["sent_ms"]],
        "stall_shares": [1 - (each["item_ns"] - each.get("wait_ns", 0)) / duration_ns for each in workers.values()],
        "cached_share": found["cached_share"],
        "messages": sum(each.get("num_sent", 0) for each in workers.values()),
        "bytes": sum(each.get("sent_bytes", 0) for each in workers.values()),
        "item_ms": [each["item_ns"] / max(each["num_items"], 1) / 1e6 / dilation for each in workers.values()],
        "host": {kind: _host(*own, duration_ns, mode) for kind, own in kinds.items() if own[0]},
        **lateness(workers),
        "client_late_p99_ms": found["client_late_p99_ms"],
        "queues": found["queues"],
    }


def _of_kind(found: Row, name: str) -> tuple[list[dict], list[dict]]:
    """Return the counts of the workers of a kind, and the CPU times of their processes."""
    workers = [figures for worker, figures in found["workers"].items() if worker.startswith(name)]
    is_expert = name == "expert worker"
    return workers, [times for process, times in found["cpu"].items() if process.startswith("experts") == is_expert]


def _host(workers: list[dict], cpu: list[dict], duration_ns: float, mode: str) -> Row:
    """Return the host's microseconds for an item, not dilated.

    `elapsed_us` is the time beside modelled work in which a worker had something to do: its own code, the wait for a
    core, and late wake-ups, which `late_us` counts and `own_us` leaves out. The others are processor time: of the main
    loop, with encoding and sockets, also while the modelled device works, and of the threads that carry messages.
    """
    num_items = sum(each["num_items"] for each in workers)
    if mode == "async":
        elapsed_ns = sum(each["lived_ns"] - each["idle_ns"] - each["item_ns"] for each in workers)
    else:
        elapsed_ns = sum(duration_ns - each["item_ns"] for each in workers)
    late_ns = sum(each["late_ns"] for each in workers)
    return {
        "num_items": num_items,
        "elapsed_us": elapsed_ns / num_items / 1e3,
        "late_us": late_ns / num_items / 1e3,
        "own_us": (elapsed_ns - late_ns) / num_items / 1e3,
        "main_cpu_us": sum(times["main_s"] for times in cpu) / num_items * 1e6,
        "transport_cpu_us": sum(times["other_s"] for times in cpu) / num_items * 1e6,
    }


def host_of(alone: list[Row], figure: str = "elapsed_us") -> HostTimes:
    """Return the host's times for the simulation of this machine."""
    of = {row["mode"]: row["host"] for row in alone}
    asynchronous, lock_step = of.get("async", {}), of.get("ep", {})
    return HostTimes(
        attention_us=asynchronous.get("attention", {}).get(figure, 0.0),
        expert_us=asynchronous.get("experts", {}).get(figure, 0.0),
        step_us=lock_step.get("attention", {}).get(figure, 0.0),
    )


def forecast_host(alone: list[Row]) -> HostTimes:
    """Return the host's times where no wake-up is late."""
    return host_of(alone, "own_us")


def compared(paced: list[Row], simulated: list[Row]) -> list[Row]:
    """Return paced and simulated figures side by side, with their relative difference."""
    rows = []
    for own, other in zip(paced, simulated, strict=True):
        row: Row = {key: own[key] for key in ("mode", "gate", "dilation", "is_valid", "worst_late_share")}
        for name, value in _comparable(own).items():
            expected = _comparable(other)[name]
            # A stall is a share of the time already; another quotient would exaggerate small ones.
            difference = value - expected if name.startswith("stall") else value / expected - 1
            row[name] = {"paced": value, "simulated": expected, "difference": difference}
        row["beyond_goal"] = [name for name in _comparable(own) if abs(row[name]["difference"]) > GOAL]
        rows.append(row)
    return rows


def _comparable(row: Row) -> dict[str, float]:
    shares, num_homes = row["stall_shares"], 4 if row["mode"] == "async" else 8
    figures = {
        "tokens_per_s": row["tokens_per_s"],
        "itl_mean_ms": row["itl_ms"]["mean"],
        "itl_p99_ms": row["itl_ms"]["p99"],
        "ttft_mean_ms": row["ttft_ms"]["mean"],
        "stall_engines": float(np.mean(shares[:num_homes])),
    }
    if shares[num_homes:]:
        figures["stall_experts"] = float(np.mean(shares[num_homes:]))
    return figures
