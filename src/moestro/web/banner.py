"""What an operator reads in the terminal: the banner of a ready server, and a log line every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.panel import Panel
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """Contents of a banner.

    Attributes:
        title: Title of the frame.
        rows: Name and text of each line in the frame.
        notes: Lines below the frame.
        example: Command that runs without changes.
    """

    title: str
    rows: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()
    example: str


def print_banner(banner: Banner, console: Console | None = None) -> None:
    """Print `banner`, to stderr unless a console is given."""
    console = console or Console(stderr=True)
    table = Table.grid(padding=(0, 2))
    for name, text in banner.rows:
        table.add_row(f"[bold]{name}[/bold]", text)
    console.print(Panel(table, title=banner.title, title_align="left", expand=False))
    for note in banner.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print("Try it:")
    console.print(f"  {banner.example}", markup=False, highlight=False, soft_wrap=True)


def curl_line(url: str, body: dict[str, object], *, needs_key: bool, options: str = "") -> str:
    """Return a shell command that sends a completion request.

    Args:
        options: Additional options of curl, each followed by a space.
    """
    key = ' -H "Authorization: Bearer $MOESTRO_API_KEY"' if needs_key else ""
    quoted = msgspec.json.encode(body).decode().replace("'", "'\\''")
    return f"curl {url}/v1/completions {options}-H 'Content-Type: application/json'{key} -d '{quoted}'"


# Log lines that tell an operator what a server did in the last ten seconds.

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_forever(lines: Callable[[float], Iterable[str]]) -> None:
    """Log what the server did, again at every interval.

    Args:
        lines: Callable that returns the lines about the last given seconds; none while there is no traffic.
    """
    then = time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = time.monotonic()
        for line in lines(now - then):
            logger.info("%s", line)
        then = now
