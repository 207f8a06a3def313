"""`moestro plan`: searches, judges, shows, and writes files."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moestro.errors import ConfigError
from moestro.planner.divisions import HostMemoryAnswer, host_memory_that_pays
from moestro.planner.plan import DeploymentPlan, Margin, PlannedDeployment, PlanSearch, SearchFindings, make_plan
from moestro.planner.question import PlanQuestion, make_question
from moestro.planner.settings import PlanSettings
from moestro.planner.timed_plan import TimedPlan, plan_over_time, print_timed_plan
from moestro.workload.progress import progress_bar

_SHOWN_MISFITS = 6
_SEARCH_SHARE = 0.5  # of the time: at least as much is left for the search of deployments
Answer = TypeVar("Answer")


def print_plan(console: Console, plan: DeploymentPlan) -> None:
    """Print what wins, the table of deployments, the commands and the assumptions."""

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if plan.deployments:
        console.print(_table(plan))
        line("seqs: of an engine (--max-num-seqs). <: estimate. *: the simulator alone runs it.")
    for title, reason in list(plan.misfits.items())[:_SHOWN_MISFITS]:
        line(f"does not fit: {title}: {reason}")
    if len(plan.misfits) > _SHOWN_MISFITS:
        line(f"does not fit: {len(plan.misfits) - _SHOWN_MISFITS} more (plan.json has them)")
    for sentence in verdict(plan):
        line(sentence)
    if plan.host_memory is not None:
        for sentence in plan.host_memory.sentences():
            line(sentence)
    for title in dict.fromkeys(each for each in (plan.winner, plan.served) if each is not None):
        _print_commands(line, plan.named(title))
    line("Assumptions (all figures are simulated):")
    for sentence in plan.assumptions:
        line(f"- {sentence}")


def verdict(plan: DeploymentPlan) -> list[str]:
    """Return the sentences that answer the question."""
    if plan.nothing_fits is not None:
        return [plan.nothing_fits]
    if plan.winner is None:
        return [_nearest(plan)]
    winner = plan.named(plan.winner)
    found = [f"Best: {winner.title}, {_figures(winner)}"]
    if plan.margin is not None:
        found.append(_compared(plan.margin))
    late = [each.title for each in plan.deployments if each.status == "not reached"]
    if late:
        found.append(f"The time did not suffice for {', '.join(late)}: raise --time")
    if winner.share_of_rate is not None:
        found.append(_rate(winner, winner.share_of_rate))
    return found


def _nearest(plan: DeploymentPlan) -> str:
    point = plan.nearest_point
    if plan.nearest is None or point is None:
        return "No deployment was simulated: raise --time"
    return (
        f"No deployment keeps the objectives. The nearest is {plan.nearest} with {point.num_requests:,} requests in"
        f" progress: ITL {point.itl_ms:.1f} ms, TTFT {point.ttft_ms:.0f} ms, {point.tokens_per_s:,.0f} tokens/s"
    )


def _figures(each: PlannedDeployment) -> str:
    ttft = "" if each.ttft_ms is None else f", TTFT {each.ttft_ms:.0f} ms"
    return (
        f"{each.tokens_per_s:,.0f} output tokens/s with {each.num_requests:,} requests in progress,"
        f" ITL {each.itl_ms:.1f} ms{ttft} (means)"
    )


def _compared(margin: Margin) -> str:
    if margin.num_seeds < 2:
        return (
            f"It has {margin.mean:.2f} times the throughput of {margin.second}, under one seed: whether this is more"
            " than the noise is unknown (raise --time)"
        )
    interval = f"95 % interval {margin.low:.2f} to {margin.high:.2f}, {margin.num_seeds} seeds"
    if margin.is_tie:
        return f"It ties with {margin.second}: {margin.mean:.2f} times its throughput, within the noise ({interval})"
    return f"It has {margin.mean:.2f} times the throughput of {margin.second} ({interval})"


def _rate(winner: PlannedDeployment, share: float) -> str:
    if share >= 1:
        return f"It serves --request-rate with {share:.2f} times the throughput that it needs"
    return f"It serves {share:.0%} of --request-rate: about {1 / share:.1f} times as many GPUs are needed"


def _print_commands(line: Callable[[str], None], each: PlannedDeployment) -> None:
    if not each.commands:
        line(f"{each.title} is simulated only: {each.why_not}")
        return
    line(f"Start {each.title}:")
    for command in each.commands:
        line(f"    {command}")
    if "--device paced:" in each.commands[0]:
        line("    (paced devices: for GPUs, name the checkpoint's directory, and --device cuda in place of paced)")


def _table(plan: DeploymentPlan) -> Table:
    table = Table(
        title="Most output tokens a second within the objectives, simulated",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("deployment", no_wrap=True)
    for name in ("tokens/s", "requests", "ITL ms", "TTFT ms", "seqs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in plan.deployments:
        table.add_row(
            each.title + ("" if each.why_not is None else " *"),
            f"< {each.estimated_tokens_per_s:,.0f}" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
            "-" if each.num_requests is None else f"{each.num_requests:,}",
            "-" if each.itl_ms is None else f"{each.itl_ms:.1f}",
            "-" if each.ttft_ms is None else f"{each.ttft_ms:.0f}",
            "-" if each.limits is None else f"{each.limits.max_num_seqs:,}",
            "" if each.status == "kept" else each.status,
        )
    return table


def run_plan(settings: PlanSettings, console: Console) -> tuple[DeploymentPlan, PlanQuestion] | None:
    """Answer the question of `settings`, and print the answer.

    Returns:
        The plan and its question, for a picture. None means a plan over times, which has no curves.

    Raises:
        ConfigError: a name is unknown, or a file cannot be read or written.
    """
    out = settings.search.out
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error}") from error
    if settings.finds != "throughput":
        timed = _timed("simulations", settings.search.time, partial(plan_over_time, settings))
        print_timed_plan(console, timed)
        _write(timed, out, console)
        return None
    question = make_question(settings)

    def search(
        seconds_left: Callable[[], float], on_step: Callable[[str], None]
    ) -> tuple[SearchFindings, HostMemoryAnswer | None]:
        # Host memory first: it refuses a log that cannot tell, and takes seconds where a search takes all there are.
        least_left = settings.search.time * _SEARCH_SHARE
        host_memory = host_memory_that_pays(question, lambda: seconds_left() - least_left)
        return PlanSearch(question, seconds_left, on_step).run(), host_memory

    found, host_memory = _timed("estimates", settings.search.time, search)
    plan = msgspec.structs.replace(make_plan(question, found), host_memory=host_memory)
    if question.network.experts is None:
        console.print(f"{question.network.name} has no experts: replicas alone are planned", highlight=False)
    print_plan(console, plan)
    _write(plan, out, console)
    return plan, question


def _timed(
    title: str, seconds: float, answer: Callable[[Callable[[], float], Callable[[str], None]], Answer]
) -> Answer:
    """Run a search under a progress bar; it gets the seconds that are left, and shows its steps."""
    begin_s = time.monotonic()
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(title, total=round(seconds))

        def seconds_left() -> float:
            passed = time.monotonic() - begin_s
            bar.update(task, completed=round(min(passed, seconds)))
            return seconds - passed

        return answer(seconds_left, lambda text: bar.update(task, description=text))


def _write(plan: DeploymentPlan | TimedPlan, out: Path | None, console: Console) -> None:
    if out is not None:
        write_plan(out / "plan.json", plan)
        console.print(f"written: {out / 'plan.json'}", highlight=False, soft_wrap=True)


def write_plan(path: Path, plan: DeploymentPlan | TimedPlan) -> None:
    """Write a plan as indented JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out {path.parent} cannot be written: {error}") from error
