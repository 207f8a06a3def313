"""Loads the placement functions of DeepSeek's EPLB and of vLLM from their sources, which Moestro does not contain."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch


def deepseek(path: Path) -> ModuleType:
    """Load `eplb.py` of deepseek-ai/EPLB."""
    spec = importlib.util.spec_from_file_location("deepseek_eplb", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vllm(path: Path) -> type:
    """Load vLLM's `DefaultEplbPolicy` without vLLM's package.

    Args:
        path: Folder that holds `vllm/distributed/eplb/policy`, such as an unpacked wheel.
    """
    package = ModuleType("vllm_eplb_policy")  # its own __init__ would load all of vLLM
    package.__path__ = [str(path / "vllm" / "distributed" / "eplb" / "policy")]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.default").DefaultEplbPolicy


@contextlib.contextmanager
def stable_sorts() -> Iterator[None]:
    """Make both peers keep the order of equal loads, which their sorts leave to versions and to the processor."""
    torch_sort, numpy_sort = torch.Tensor.sort, np.argsort

    def stable_sort(tensor: torch.Tensor, dim: int = -1, descending: bool = False) -> object:  # noqa: FBT001, FBT002
        return torch_sort(tensor, dim=dim, descending=descending, stable=True)

    def stable_argsort(array: np.ndarray, axis: int = -1) -> np.ndarray:
        return numpy_sort(array, axis=axis, kind="stable")

    torch.Tensor.sort, np.argsort = stable_sort, stable_argsort
    try:
        yield
    finally:
        torch.Tensor.sort, np.argsort = torch_sort, numpy_sort
