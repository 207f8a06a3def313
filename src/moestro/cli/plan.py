"""`moestro plan`: which deployment to start."""

from __future__ import annotations

from moestro.cli.app import app
from moestro.cli.extras import install_command, is_installed
from moestro.cli.loading import loading
from moestro.planner.settings import (
    HardwareSettings,
    ObjectiveSettings,
    PlanSearchSettings,
    PlanSettings,
    TrafficSettings,
)


@app.command
def plan(
    model: str,
    *,
    hardware: HardwareSettings = HardwareSettings(),
    traffic: TrafficSettings = TrafficSettings(),
    objectives: ObjectiveSettings = ObjectiveSettings(),
    search: PlanSearchSettings = PlanSearchSettings(),
) -> None:
    """Find the mode and the division of GPUs that serve a workload best, by simulation, without any GPU.

    * moestro plan mixtral-8x7b --gpu a100-40g --num-gpus 8 --isl 500 --osl 150 --max-itl 100
    * moestro plan DIR --gpu h100 --num-gpus 16 --dataset-path trace.jsonl --max-itl 50 --max-ttft 2000 --out plan/

    Parameters
    ----------
    model
        A network by name (mixtral-8x7b, qwen3-30b-a3b, …), or a checkpoint directory or its config.json.
    """
    from rich.console import Console

    with loading("the planner"):
        from moestro.planner.verb import run_plan

    settings = PlanSettings(model=model, hardware=hardware, traffic=traffic, objectives=objectives, search=search)
    console = Console()
    answer, question = run_plan(settings, console)
    if search.out is None or not answer.deployments:
        return
    if not is_installed("plots"):
        console.print(f"no picture: {install_command('plots')}")
        return
    from moestro.planner.draw import save_curves

    save_curves(search.out / "curves.png", answer, question)
    console.print(f"written: {search.out / 'curves.png'}", highlight=False, soft_wrap=True)
