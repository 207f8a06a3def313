"""Tables of docs/route.md: what the router costs, and what it does before real vLLM servers and simulated ones."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "routing"
_TTFT_RATIO = "ttft_mean_ms_over_round_robin"


def _spread(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def loads_table() -> str:
    """Mean TTFT over round robin's by share of the capacity, measured and simulated, and the measured hit ratios."""
    by_share = json.loads((RESULTS / "vllm_loads.json").read_text())["by_share"]
    shares = [f"{float(share):.0%}" for share in by_share]
    columns = ["policy", *(f"{share}: {kind}" for share in shares for kind in ("measured", "simulated", "hit ratio"))]
    rows = []
    for policy in next(iter(by_share.values()))["measured"]:
        cells = []
        for found in by_share.values():
            measured, simulated = (found[kind][policy] for kind in ("measured", "simulated"))
            cells += [_spread(measured[_TTFT_RATIO]), f"{simulated[_TTFT_RATIO]['median']:.2f}"]
            cells += [f"{measured['hit_ratio']['median']:.2f}"]
        rows.append([f"`{policy}`", *cells])
    equal = [
        f"{found['pairs_in_equal_order']} at {share}" for share, found in zip(shares, by_share.values(), strict=True)
    ]
    found = _table(columns, rows)
    return "\n".join([*found, "", f"Pairs of policies whose simulated order is the measured one: {', '.join(equal)}."])


def costs_table() -> str:
    """Processor time of a request and time added to its first byte, of this router and of its peers."""
    found = json.loads((RESULTS / "router_overhead.json").read_text())["summary"]
    cases = {
        "small": "2.4 kB",
        "32 kB": "32 kB",
        "small, stream": "2.4 kB, streamed",
        "32 kB, stream": "32 kB, streamed",
    }
    ours = {"moestro route, least_loaded": "`least_loaded`", "moestro route, moestro": "`moestro`"}
    ours["moestro route, moestro, exact"] = "`moestro`, exact"
    systems = sorted(found["small"].keys() - {"direct"}, key=lambda name: ("bytes" not in name, name not in ours, name))
    rows = []
    for case, title in cases.items():
        of = (found[case][system]["cpu_us"] for system in systems)
        rows.append([title, *(f"{each['median']:,.0f} ({each['min']:,.0f} to {each['max']:,.0f})" for each in of)])
    rows.append(["**first byte, ms added**", *[""] * len(systems)])
    for case, title in cases.items():
        rows.append([title, *(f"{found[case][system]['added_first_byte_p50_ms']:.2f}" for system in systems)])
    return "\n".join(_table(["µs of CPU a request", *(ours.get(system, system) for system in systems)], rows))


def simulated_queue_table() -> str:
    """Latencies of both classes before overloaded simulated engines, and the ratios to a router without a queue."""
    return _queue_table(RESULTS.parent / "simulator" / "router_queue.json", 1)


def queue_table() -> str:
    """Latencies of both classes before overloaded vLLM servers, and the ratios to a router without a queue."""
    return _queue_table(RESULTS / "vllm_queue.json", 2)


def _queue_table(path: Path, digits: int) -> str:
    stored = json.loads(path.read_text())
    columns = [
        "",
        "TTFT of `ls`, mean and P99, s",
        "over no queue",
        "of `be`, mean and most, s",
        "tokens/s over no queue",
    ]
    rows = []
    for row, found in stored["rows"].items():
        over = stored["over_no_queue"][row]
        at = {name: f"{spread['median']:.{digits}f}" for name, spread in found.items()}
        urgent = f"{at['urgent_ttft_mean_s']}, {at['urgent_ttft_p99_s']}"
        others = f"{at['best_effort_ttft_mean_s']}, {at['best_effort_ttft_max_s']}"
        rows.append([row, urgent, _spread(over["urgent_ttft_mean_s"]), others, _spread(over["tokens_per_s"])])
    return "\n".join(_table(columns, rows))


def fleet_table() -> str:
    """Return failures, kept engines and traffic of one router and of three, one of which is killed under load."""
    stored = json.loads((RESULTS / "fleet.json").read_text())
    runs = stored["runs"]
    titles = {"one": "one router", "apart": "three without `--peer`", "shared": "three with `--peer`"}
    titles["smg_mesh"] = f"three of smg {stored['peers']['smg']}, `--enable-mesh`"
    rows: dict[str, list[str]] = {
        "requests that failed before their first byte": [],
        "turns at the engine of the turn before; from the kill on": [],
        "new prompts that another router sends to the same engine 0, 0.2, 1 and 5 s after the answer": [],
        "streams that were cut, all of the killed router": [],
        "bytes between the routers: a request; a second without requests": [],
        "ms of CPU of all routers a request": [],
    }
    for name in titles:
        run, several = runs[name], name != "one"
        after_kill = f"; {run['kept_engine_after_kill']:.0%}" if several else ""
        followed = ", ".join(f"{100 * share:.0f}" for share in run["followed_after_s"].values()) if several else ""
        sent = f"{run['bytes_per_request']:,}; {run['bytes_per_s_without_requests']:,}" if run["shared"] else ""
        cells = [
            f"{run['failed_before_first_byte']} of {run['requests']:,}",
            f"{run['kept_engine']:.0%}{after_kill}".replace("%", " %"),
            followed and f"{followed} %",
            str(run["cut_after_first_byte"]),
            sent,
            f"{run['cpu_ms_per_request']:.1f}" if several else "",
        ]
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    ms = runs["shared"]["converged_ms"]
    after = f"another router counts a request after {ms['median']:.0f} ms (median; {ms['min']:.0f} to {ms['max']:.0f})."
    table = _table(["", *titles.values()], [[title, *cells] for title, cells in rows.items()])
    return "\n".join([*table, "", f"With `--peer` {after}"])


def ranks_table() -> str:
    """Times of routing policies over the ranks of one vLLM server, and of the server's own balancer."""
    stored = json.loads((RESULTS / "vllm_ranks.json").read_text())
    columns = [
        "policy",
        "mean TTFT, ms",
        "over round robin",
        "P99 TTFT over round robin",
        "TPOT over round robin",
        "hit ratio",
    ]
    rows = []
    for policy, found in stored["policies"].items():
        ratios = [
            _spread(found[f"{name}_over_round_robin"]) for name in ("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms")
        ]
        name = "vLLM's own balancer" if policy == "vllm" else f"`{policy}`"
        hits = f"{found['hit_ratio']['median']:.2f}"
        rows.append([name, f"{found['ttft_mean_ms']['median']:.0f}", *ratios, hits])
    return "\n".join(_table(columns, rows))
