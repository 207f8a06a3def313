"""Each test runs twice: on the first CUDA device (marker `gpu`), and on an imitated one, so that the tests are tested.

pytest tests/gpu              everywhere: the imitated accelerator, and the GPU if there is one
pytest -m gpu tests/gpu       the GPU alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest
import torch
from parity.conftest import checkpoint
from support import imitated_accelerator

from moestro.model.network import Network
from moestro.model.tensors import prepare

__all__ = ["checkpoint"]


@dataclass(frozen=True)
class Accelerator:
    """Where a test runs. `forbid_waits`: inside, an operation fails that waits for the device."""

    device: torch.device
    forbid_waits: Callable[[], AbstractContextManager[None]]
    is_imitated: bool = False

    def place(self, network: Network) -> Network:
        """The network, moved there."""
        return Network(network.model.to(self.device))


@contextmanager
def _forbid_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def require_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "imitated"])
def accelerator(request, monkeypatch) -> Iterator[Accelerator]:
    if request.param == "cuda":
        require_cuda()
        prepare(torch.device("cuda", 0))
        yield Accelerator(torch.device("cuda", 0), _forbid_waits)
    else:
        with imitated_accelerator.imitated(monkeypatch):
            prepare(imitated_accelerator.DEVICE)
            yield Accelerator(imitated_accelerator.DEVICE, imitated_accelerator.forbid_waits, is_imitated=True)
