"""The imitated accelerator finds what it is for: mixed devices, host memory read too early, and waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import imitated_accelerator
from support.imitated_accelerator import DEVICE, WaitedError, forbid_waits, num_waits

from moestro.core.work import Forward
from moestro.model.upload import upload


@pytest.fixture(autouse=True)
def _imitated(monkeypatch):
    with imitated_accelerator.imitated(monkeypatch):
        yield


def test_tensors_are_there_and_numbers_are_right():
    there = torch.arange(6.0, device=DEVICE).view(2, 3)
    assert (there.device, there.is_cuda, (there @ there.T).device) == (DEVICE, True, DEVICE)
    there[0] = 2
    there[:, :0] = 1.0
    there += torch.tensor(1.0)  # a host tensor without dimensions may take part
    assert there.cpu().tolist() == [[3, 3, 3], [4, 5, 6]]
    assert torch.zeros(2, device="cpu").device.type == "cpu"


def test_tensors_of_two_devices_do_not_mix():
    there = torch.zeros(3, device=DEVICE)
    mixtures = (
        lambda: there + torch.zeros(3),
        lambda: there[torch.tensor([0])],
        lambda: torch.cat([there, torch.zeros(1)]),
    )
    for mix in mixtures:
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there[0].item(),
        lambda there: bool(there[0] > 0),
        lambda there: there.tolist(),
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: torch.zeros(2).to(DEVICE),
        lambda there: torch.tensor([1.0], device=DEVICE),
        lambda there: there[[0, 1]],
        lambda there: there.__setitem__(torch.arange(2, device=DEVICE), 5.0),
        lambda there: torch.cuda.current_stream(DEVICE).synchronize(),
    ],
)
def test_what_waits_counts_and_may_be_forbidden(wait):
    there, before = torch.ones(3, device=DEVICE), num_waits()
    wait(there)
    assert num_waits() == before + 1
    with forbid_waits(), pytest.raises(WaitedError):
        wait(there)


def test_an_upload_does_not_wait_and_does_not_see_later_changes():
    numbers = np.arange(3)
    with forbid_waits():
        there = upload(numbers, DEVICE)
    numbers[:] = 9
    assert there.tolist() == [0, 1, 2]


def test_results_are_not_there_before_their_event(tmp_path):
    network = tiny.load(tiny.save_checkpoint(tmp_path, tiny.make_config("qwen3_moe")))
    units = drive.make_units([(0, [5, 6, 7]), (0, [9])], [[0], [1]])
    wanted = drive.run(drive.make_device(network), units).token_ids.tolist()
    device = drive.make_device(type(network)(network.model.to(DEVICE)))
    device.launch(Forward(units), 0)
    assert device._running[0].read().token_ids.tolist() == [77, 77]
    assert [result.token_ids.tolist() for result in device.poll(0)] == [wanted]
