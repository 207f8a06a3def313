"""ORCA's response header with the load of the server, for load balancers that decide by it, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moestro.core.load_figures import LoadFigures

FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"


def load_headers(wanted: str | None, loads: Sequence[LoadFigures]) -> dict[str, str]:
    """Return the header for an answer; none without `wanted`, or for a format that vLLM does not know either.

    Args:
        wanted: Value of the request's `endpoint-load-metrics-format`: TEXT or JSON, in any case.
        loads: Last report of each engine behind the port.
    """
    form = (wanted or "").strip().upper()
    if form not in {"TEXT", "JSON"}:
        return {}
    usages = [load.kv_usage or 0.0 for load in loads]
    figures = {
        "kv_cache_usage_perc": sum(usages) / len(usages),
        "num_requests_waiting": float(sum(load.num_waiting or 0 for load in loads)),
    }
    if form == "TEXT":
        return {LOAD_HEADER: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())}
    return {LOAD_HEADER: f"JSON {msgspec.json.encode({'named_metrics': figures}).decode()}"}
