"""The device of a process, and what torch has to know before anything is allocated, pinned or launched there."""

from __future__ import annotations

import torch

from moestro.errors import ConfigError
from moestro.model.settings import ModelSettings


def choose_device(settings: ModelSettings, rank: int = 0) -> torch.device:
    """Choose the device that the settings name; of several accelerators, the rank's own.

    Args:
        rank: number of the rank. Ranks take the accelerators in turn; with more ranks than accelerators they share.

    Raises:
        ConfigError: the settings name `cuda`, and torch finds no CUDA device.
    """
    present = torch.cuda.is_available()
    if settings.device == "cuda" and not present:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device: give --device cpu, or check the GPU's"
            " driver and install a torch that is built for CUDA"
        )
    if not present or settings.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def open_device_of(settings: ModelSettings, rank: int = 0) -> torch.device:
    """Choose the device as `choose_device` does, and prepare this process for it. Arguments and errors are the same."""
    device = choose_device(settings, rank)
    prepare(device)
    return device


def prepare(device: torch.device) -> None:
    """Make an accelerator the current one of this thread, and let torch's attention there do without cuDNN.

    A CPU needs nothing.
    """
    if device.type == "cpu":
        return
    # Pinned memory, events and Triton's launches belong to the current device, whatever the device of their tensors.
    torch.cuda.set_device(device)
    # cuDNN builds a plan, which takes tens of milliseconds, for each new shape of masked attention; torch would choose
    # it first. Shapes of steps hardly ever repeat.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
