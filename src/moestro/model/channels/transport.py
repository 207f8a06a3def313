"""How tensors go from one process to another: NCCL between GPUs, or gloo, which knows host memory alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, distributed

from moestro.model.results import to_host

Backend = Literal["gloo", "nccl"]

CPU = "cpu"  # name of a device


def name_device(device: torch.device) -> str:
    """Return the name of a process's device: no two GPUs of a machine have the same one, whatever their numbers."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(names: Sequence[str]) -> Backend:
    """Choose how processes send each other the tensors of their devices.

    Args:
        names: name of each process's device, from `name_device`.

    Returns:
        "nccl" where each has a GPU of its own. NCCL refuses two processes on one GPU, and knows no CPU.
    """
    have_own = CPU not in names and len(set(names)) == len(names)
    return "nccl" if have_own and distributed.is_nccl_available() else "gloo"


def describe_backend(names: Sequence[str]) -> str:
    """Describe the choice of `choose_backend` for the operator; "" for processes without GPUs.

    Args:
        names: as for `choose_backend`.
    """
    if all(name == CPU for name in names):
        return ""
    if choose_backend(names) == "nccl":
        return "NCCL, because each process has a GPU of its own"
    if CPU in names:
        return "gloo through host memory, because a process has no GPU"
    if len(set(names)) < len(names):
        return "gloo through host memory, because processes share a GPU, which NCCL refuses"
    return "gloo through host memory, because this torch was built without NCCL"


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, pinned for one of an accelerator, after waiting for it."""
    copy = to_host(tensor)
    if tensor.device.type != "cpu":
        torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory from which a copy to `device` makes the host wait as little as possible."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type != "cpu")
