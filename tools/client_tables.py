"""The tables of clients and agents in docs/clients.md, made from stored results."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "serving"


def clients_table() -> str:
    """Clients with their versions, their cases, and how many pass directly and through the router; then failures."""
    clients = json.loads((RESULTS / "clients.json").read_text())["clients"]
    rows = ["| client | version | cases | direct | through `moestro route` |", "|---|---|---|---|---|"]
    failures = []
    for name, client in clients.items():
        cases = client["cases"]
        direct, routed = (f"{sum(case[place] for case in cases)} of {len(cases)}" for place in ("direct", "routed"))
        names = "; ".join(case["case"] for case in cases)
        rows.append(f"| `{name}` | {client['version']} | {names} | {direct} | {routed} |")
        failures += [f"- `{name}`, {case['case']}: {_one_line(case['reason'])}" for case in cases if case["reason"]]
    return "\n".join([*rows, "", *(failures or ["Every case passes."])])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def agents_table() -> str:
    """Return the results of coding agents: version, and how the task ended directly and through the router."""
    rows = ["| agent | version | direct | through `moestro route` |", "|---|---|---|---|"]
    agents = json.loads((RESULTS / "agents.json").read_text())["agents"]
    for name, row in agents.items():
        rows.append(f"| {name} | {row['version']} | {_one_line(row['direct'])} | {_one_line(row['routed'])} |")
    return "\n".join(rows)
