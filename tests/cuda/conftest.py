"""Each test runs twice: on the first CUDA device (marker `gpu`), and in Triton's interpreter.

pytest tests/cuda              everywhere: the interpreter, or the GPU if there is one
pytest -m gpu tests/cuda       the GPU alone

All memory that a test allocates is NaN at first, or the largest integer, so that a kernel that reads what nothing
has written gives itself away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from parity.conftest import checkpoint
from support import triton_interpreter

from moestro.model.cuda import tiles

__all__ = ["checkpoint"]

SMALL_SPLIT = 64

if find_spec("triton") is None:  # there is none for this platform
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "interpreter"])
def device(request) -> Iterator[torch.device]:
    """Where kernels run."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")
        yield torch.device("cuda", 0)
        return
    if not triton_interpreter.is_interpreting():
        pytest.skip("a process that runs kernels on a GPU cannot interpret them")
    triton_interpreter.correct()
    with np.errstate(all="ignore"):  # a GPU computes infinity and NaN in rows that are masked, without a warning
        yield torch.device("cpu")


@pytest.fixture
def split(device, monkeypatch) -> int:
    """Keys of a split of attention: fewer in the interpreter, which takes a millisecond for a tile."""
    if device.type == "cuda":
        return tiles.SPLIT
    monkeypatch.setattr("moestro.model.cuda.functions.SPLIT", SMALL_SPLIT)
    monkeypatch.setattr("moestro.model.cuda.tiles.SPLIT", SMALL_SPLIT)
    return SMALL_SPLIT


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
