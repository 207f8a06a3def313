"""Imports of a verb: the sign on a terminal that its libraries load, which takes up to some seconds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Show "Loading …" with a spinner on stderr for the duration of the block, on a terminal only.

    Args:
        what: noun phrase of what is loaded.
    """
    console = Console(stderr=True)
    with console.status(f"Loading {what} …") if console.is_terminal else contextlib.nullcontext(), uncollected():
        yield


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage during the block: what an import makes stays, and the search takes a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
