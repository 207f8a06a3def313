"""The table of clients in docs/clients.md, made from the stored result of their cases."""

from __future__ import annotations

import json
from pathlib import Path

RESULT = Path(__file__).parents[1] / "bench" / "results" / "serving" / "clients.json"


def clients_table() -> str:
    """Clients with their versions, their cases, and how many pass directly and through the router; then failures."""
    clients = json.loads(RESULT.read_text())["clients"]
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
