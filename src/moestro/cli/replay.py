"""`moestro replay`: repeats the decisions of a record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.cli.app import app
from moestro.errors import ConfigError


@app.command(name="replay")
def replay_decisions(*record: Path, policy: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()) -> None:
    """Repeat every decision of records; the exit status is 0 if all are equal, 1 if not.

    The record holds the router's whole input, so decisions differ only if Moestro or a policy's file has changed.
    Of moestro serve, the order of waiting requests and the victims of preemptions are repeated too.

    Parameters
    ----------
    record
        Files of --record, of moestro route or of moestro serve; of several routers, the decisions of all are counted.
    policy
        Decide by these routing policies instead, and say what changes: lmetric, bailian:hit_weight=0.5, FILE.py:NAME.
    """
    from rich.console import Console

    if not record:
        raise ConfigError("moestro replay takes one or more files of --record")
    if policy:
        from moestro.cli.recorded.replay import print_redecisions

        print_redecisions(record, policy, Console(soft_wrap=True))
        return

    from moestro.cli.recorded.replay import replay_records

    if not replay_records(record, Console(soft_wrap=True)):
        sys.exit(1)
