"""`moestro replay`: repeats the decisions of a record."""

from __future__ import annotations

import sys
from pathlib import Path

from moestro.cli.app import app


@app.command(name="replay")
def replay_decisions(record: Path) -> None:
    """Repeat every decision of a record; the exit status is 0 if all are equal, 1 if not.

    The record holds the router's whole input, so decisions differ only if Moestro or a policy's file has changed.
    Of moestro serve, the order of waiting requests and the victims of preemptions are repeated too.

    Parameters
    ----------
    record
        A file of --record, of moestro route or of moestro serve.
    """
    from rich.console import Console

    from moestro.cli.recorded.replay import replay_record

    if not replay_record(record, Console(soft_wrap=True)):
        sys.exit(1)
