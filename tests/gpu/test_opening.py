"""What opening a device does on an accelerator before anything runs there, on the imitated one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from parity.conftest import checkpoint
from support import imitated_accelerator
from support.imitated_accelerator import DEVICE

from moestro.core.expert_table import ExpertTable
from moestro.core.work import LOGITS_LAST
from moestro.model.device import open_device
from moestro.model.expert_open import open_expert_device
from moestro.model.staged_open import open_staged_device
from moestro.model.worker_share import WorkerShare

__all__ = ["checkpoint"]


@pytest.fixture(autouse=True)
def _imitated(monkeypatch):
    with imitated_accelerator.imitated(monkeypatch):
        yield


def _share(worker: int) -> WorkerShare:
    def table(num_layers: int, num_experts: int) -> ExpertTable:
        slots = np.arange(num_experts, dtype=np.int32).reshape(2, 1, -1).repeat(num_layers, axis=1)
        return ExpertTable(0, slots, num_experts, np.ones(2, np.bool_))

    return WorkerShare(worker=worker, make_table=table, num_guests=8)


OPENINGS = {
    "fused": open_device,
    "preemptive": lambda settings: open_staged_device(settings, 16),
    "home": lambda settings: open_staged_device(settings, 16, share=_share(0)),
    "experts": lambda settings: open_expert_device(settings, _share(1)),
}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("kind", OPENINGS)
def test_each_process_sets_its_device_before_it_uses_it(kind, load_format, checkpoint):
    """The imitated accelerator fails at memory, pinned memory and events before that, and at attention with cuDNN."""
    settings = tiny.settings_of(checkpoint("qwen3_moe"), device="cuda", load_format=load_format)
    device, info = OPENINGS[kind](settings)
    assert (info.device, device.network.device) == ("cuda", DEVICE)
    assert imitated_accelerator.current_device() == DEVICE
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_device_that_is_open_serves(checkpoint):
    device, _ = open_device(tiny.settings_of(checkpoint("qwen3_moe"), device="cuda"))
    units = drive.make_units([(0, [3, 4, 5])], [[0]], logits=np.full(1, LOGITS_LAST, np.uint8))
    assert drive.run(device, units).token_ids.min() >= 0
