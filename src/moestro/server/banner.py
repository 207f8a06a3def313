"""What the operator sees once the server is ready: what it serves, how much fits, where, and a line to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from moestro import __version__
from moestro.core.model_info import ModelInfo
from moestro.wire.messages import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What there is to tell."""

    infos: Sequence[ModelInfo]  # one per engine
    phases: Sequence[Phase]  # from the start of the process to this moment, without a gap
    names: Sequence[str]
    url: str
    needs_key: bool


def print_banner(console: Console, started: Started) -> None:
    """Print it."""
    table = Table.grid(padding=(0, 2))
    for name, text in _rows(started):
        table.add_row(f"[bold]{name}[/bold]", text)
    console.print(Panel(table, title=f"Moestro {__version__}", title_align="left", expand=False))
    for note in started.infos[0].notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print("Try it:")
    console.print(f"  {curl_line(started)}", markup=False, highlight=False, soft_wrap=True)


def curl_line(started: Started) -> str:
    """A request that works as it stands, in one line for any shell."""
    body = msgspec.json.encode({"model": started.names[0], "prompt": "def fibonacci(n):", "max_tokens": 48}).decode()
    key = ' -H "Authorization: Bearer $MOESTRO_API_KEY"' if started.needs_key else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {started.url}/v1/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def _rows(started: Started) -> list[tuple[str, str]]:
    info, count = started.infos[0], len(started.infos)
    tokens = sum(each.num_blocks * each.block_size for each in started.infos)
    gate = f", {info.num_experts} experts a layer, top-{info.num_experts_per_token}" if info.num_experts else ", dense"
    phases = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in started.phases)
    return [
        ("model", ", ".join(started.names)),
        ("network", f"{info.model_type}, {_human(info.num_parameters)} parameters, {info.num_layers} layers{gate}"),
        ("engines", f"{count} x {info.device}, {info.dtype}"),
        ("context", f"{info.max_model_len:,} tokens"),
        ("KV cache", f"{tokens:,} tokens: {tokens / info.max_model_len:.1f} sequences of the full context at once"),
        ("ready in", f"{sum(phase.seconds for phase in started.phases):.1f} s ({phases})"),
        ("serving", f"{started.url} (OpenAI's API under /v1)"),
    ]


def _human(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
