"""Progress bars for work that takes longer than a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console) -> Progress:
    """Make a bar without tasks. Only a terminal shows it, and it disappears when its block ends."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    # Two redraws a second: each takes a millisecond of the interpreter, which may also be timestamping answers.
    return Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal)


@contextmanager
def progress(title: str, total: int, every: int = 1) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while the block runs. Each call of the yielded function counts one item as done.

    Args:
        every: items between two updates of the bar. An update costs some microseconds.
    """
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        count = 0

        def advance() -> None:
            nonlocal count
            count += 1
            if count % every == 0:
                bar.update(task, completed=count)

        yield advance
