"""`moestro plan`: searches, judges, shows, and writes files."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console

from moestro.errors import ConfigError
from moestro.planner.plan import DeploymentPlan, make_plan
from moestro.planner.question import PlanQuestion, make_question
from moestro.planner.search import PlanSearch
from moestro.planner.settings import PlanSettings
from moestro.planner.show import print_plan
from moestro.workload.progress import progress_bar


def run_plan(settings: PlanSettings, console: Console) -> tuple[DeploymentPlan, PlanQuestion]:
    """Answer the question of `settings`, and print the answer.

    Raises:
        ConfigError: a name is unknown, or a file cannot be read or written.
    """
    question = make_question(settings)
    out = settings.search.out
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error}") from error
    begin_s, seconds = time.monotonic(), settings.search.time
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("estimates", total=round(seconds))

        def seconds_left() -> float:
            passed = time.monotonic() - begin_s
            bar.update(task, completed=round(min(passed, seconds)))
            return seconds - passed

        found = PlanSearch(question, seconds_left, lambda text: bar.update(task, description=text)).run()
    plan = make_plan(question, found)
    if question.network.experts is None:
        console.print(f"{question.network.name} has no experts: replicas alone are planned", highlight=False)
    print_plan(console, plan)
    if out is not None:
        write_plan(out / "plan.json", plan)
        console.print(f"written: {out / 'plan.json'}", highlight=False, soft_wrap=True)
    return plan, question


def write_plan(path: Path, plan: DeploymentPlan) -> None:
    """Write a plan as indented JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {path.parent} cannot be written: {error}") from error
