"""`moestro repro`: a verb for each paper."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from moestro.cli.app import app, install_command, is_installed
from moestro.repro.papers import Paper, papers

repro = App(
    name="repro", help="Rerun the experiments of a paper on virtual time, and compare its claims with the results."
)
app.command(repro)


def _add_verb(paper: Paper) -> None:
    """Register a verb whose flags and help the paper's folder declares."""

    def verb(*, settings: object = paper.settings()) -> None:
        from rich.console import Console

        from moestro.repro.runner import reproduce, save_pictures

        assert isinstance(settings, paper.settings)
        console, experiment = Console(), paper.experiment(settings)
        stored = paper.stored_claims() if settings.quick else None
        result = reproduce(console, paper.name, experiment, settings.out, settings.jobs, stored)
        if settings.out is None:
            return
        if not is_installed("plots"):
            console.print(f"no pictures: {install_command('plots')}")
            return
        for path in save_pictures(paper.name, experiment, result.findings, settings.out):
            console.print(f"written: {path}")

    verb.__annotations__["settings"] = Annotated[paper.settings, Parameter(name="*")]
    repro.command(verb, name=paper.name, help=paper.about)


for each in papers():
    _add_verb(each)
