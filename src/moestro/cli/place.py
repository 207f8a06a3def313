"""`moestro place`: where experts should live."""

from __future__ import annotations

from pathlib import Path

from moestro.cli.app import app
from moestro.cli.placing.settings import (
    DeviceSettings,
    OutputSettings,
    PlacePolicySettings,
    PlaceSettings,
    PriceSettings,
    ProfileSettings,
)


@app.command
def place(
    profile: list[Path],
    *,
    reading: ProfileSettings = ProfileSettings(),
    group: DeviceSettings = DeviceSettings(),
    prices: PriceSettings = PriceSettings(),
    choice: PlacePolicySettings = PlacePolicySettings(),
    output: OutputSettings = OutputSettings(),
) -> None:
    """Place a network's experts on devices, from a recorded load, and say what the move saves and costs.

    * moestro place expert_distribution_recorder_*.pt --devices 32 --slots-per-device 9 --nodes 4 --sglang init.json
    * moestro place routed.jsonl --devices 8 --slots-per-device 18 --compare --png load.png --out placement.json

    Parameters
    ----------
    profile
        Files of the recorded load: dumps of SGLang's recorder (.pt, one or one a rank), responses of vLLM with
        routed_experts (JSON lines), choices per token (.npy, .npy.zst), counts, or a profile of Moestro.
    """
    from rich.console import Console

    from moestro.cli.placing.verb import run_place

    settings = PlaceSettings(
        paths=tuple(profile), profile=reading, devices=group, prices=prices, policy=choice, output=output
    )
    run_place(settings, Console())
