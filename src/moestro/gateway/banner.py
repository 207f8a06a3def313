"""What the operator sees once the router is ready: what is behind it, how it chooses, and a line to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from moestro import __version__
from moestro.gateway.engine_admin import EngineView

_MAX_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What there is to tell.

    Attributes:
        choice: how an engine is chosen.
        prompts: how prompts are compared.
        seconds: from the start of the process to this moment.
    """

    engines: Sequence[EngineView]
    choice: str
    prompts: str
    url: str
    admin_url: str
    needs_key: bool
    seconds: float


def print_banner(console: Console, started: Started) -> None:
    """Print it."""
    table = Table.grid(padding=(0, 2))
    for name, text in _rows(started):
        table.add_row(f"[bold]{name}[/bold]", text)
    console.print(Panel(table, title=f"Moestro {__version__} route", title_align="left", expand=False))
    console.print("Try it:")
    console.print(f"  {curl_line(started)}", markup=False, highlight=False, soft_wrap=True)


def curl_line(started: Started) -> str:
    """A request that works as it stands, once an engine is up, in one line for any shell."""
    models = [model for engine in started.engines for model in engine.models]
    body = msgspec.json.encode({"model": models[0] if models else "MODEL", "prompt": "Hello", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $MOESTRO_API_KEY"' if started.needs_key else ""
    quoted = body.decode().replace("'", "'\\''")
    return f"curl {started.url}/v1/completions -i -H 'Content-Type: application/json'{key} -d '{quoted}'"


def _rows(started: Started) -> list[tuple[str, str]]:
    num_up = sum(engine.condition == "up" for engine in started.engines)
    rows = [("engines", f"{num_up} of {len(started.engines)} up")]
    for engine in started.engines[:_MAX_SHOWN]:
        what = ", ".join(engine.models) if engine.condition == "up" else f"{engine.condition}: {engine.cause}"
        rows.append(("", f"{engine.name}  {engine.url}  {what}"))
    if len(started.engines) > _MAX_SHOWN:
        rows.append(("", f"and {len(started.engines) - _MAX_SHOWN} more"))
    return [
        *rows,
        ("policy", started.choice),
        ("prompts", started.prompts),
        ("ready in", f"{started.seconds:.1f} s"),
        ("admin", f"{started.admin_url}/admin/engines, /admin/explain/REQUEST_ID, /metrics"),
        ("serving", f"{started.url} (OpenAI's API under /v1)"),
    ]
