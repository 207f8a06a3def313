"""The sign on a terminal that the command works while its libraries load, which takes up to some seconds."""

from __future__ import annotations

import contextlib

from rich.console import Console


def loading(what: str) -> contextlib.AbstractContextManager[object]:
    """Show "Loading …" with a spinner on stderr for the duration of the block, on a terminal only.

    Args:
        what: noun phrase of what is loaded.
    """
    console = Console(stderr=True)
    return console.status(f"Loading {what} …") if console.is_terminal else contextlib.nullcontext()
