"""`moestro repro`: a verb for each paper."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from moestro.cli.app import app
from moestro.repro.papers import Paper, papers

repro = App(name="repro", help="Make a paper's tables again, on virtual time, and set its claims beside what is found.")
app.command(repro)


def _add_verb(paper: Paper) -> None:
    """Register a verb whose flags and help the paper's folder declares."""

    def verb(*, settings: object = paper.settings()) -> None:
        from rich.console import Console

        from moestro.repro.runner import reproduce

        assert isinstance(settings, paper.settings)
        reproduce(Console(), paper.name, paper.experiment(settings), settings.out)

    verb.__annotations__["settings"] = Annotated[paper.settings, Parameter(name="*")]
    repro.command(verb, name=paper.name, help=paper.about)


for each in papers():
    _add_verb(each)
