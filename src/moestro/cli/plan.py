"""`moestro plan`: which deployment to start."""

from __future__ import annotations

from moestro.cli.app import app, install_command, is_installed, loading
from moestro.planner.settings import (
    HardwareSettings,
    ObjectiveSettings,
    PlanSearchSettings,
    PlanSettings,
    ServingSettings,
    TrafficSettings,
)

_WIDTH = 160  # characters of a line that goes to no terminal


@app.command
def plan(
    model: str,
    *,
    hardware: HardwareSettings = HardwareSettings(),
    traffic: TrafficSettings = TrafficSettings(),
    objectives: ObjectiveSettings = ObjectiveSettings(),
    serving: ServingSettings = ServingSettings(),
    search: PlanSearchSettings = PlanSearchSettings(),
) -> None:
    """Find the servers that hold a workload's objectives best or with the fewest GPUs, by simulation, without any GPU.

    * moestro plan mixtral-8x7b --gpu a100-40g --num-gpus 8 --isl 500 --osl 150 --max-itl 100
    * moestro plan DIR --for vllm --gpu h100 --num-gpus 16 --dataset-path day.jsonl --max-ttft 2000 --find fewest-gpus
    * moestro plan engine.toml --for vllm --dataset-path day.jsonl --max-ttft 2000 --load-factor 2 asks about twice the
      load, with the engine that moestro calibrate --server has probed.

    Parameters
    ----------
    model
        A network by name (mixtral-8x7b, qwen3-30b-a3b, …), a checkpoint directory or its config.json, or the engine
        file (.toml) of moestro calibrate --server.
    """
    from rich.console import Console

    with loading("the planner"):
        from moestro.planner.verb import run_plan

    settings = PlanSettings(
        model=model, hardware=hardware, traffic=traffic, objectives=objectives, serving=serving, search=search
    )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has room for whole tables
        console.width = max(console.width, _WIDTH)
    found = run_plan(settings, console)
    if found is None or search.out is None or not found[0].deployments:
        return
    if not is_installed("plots"):
        console.print(f"no picture: {install_command('plots')}")
        return
    from moestro.planner.draw import save_curves

    save_curves(search.out / "curves.png", *found)
    console.print(f"written: {search.out / 'curves.png'}", highlight=False, soft_wrap=True)
