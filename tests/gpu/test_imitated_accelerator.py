"""The imitated accelerator finds what it is for: mixed devices, host memory read too early, and waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import drive, tiny
from support import imitated_accelerator
from support.imitated_accelerator import DEVICE, RaceError, WaitedError, forbid_waits, num_waits, set_card

from moestro.core.work import Forward
from moestro.model.tensors import prepare, upload


@pytest.fixture(autouse=True)
def _imitated(monkeypatch):
    with imitated_accelerator.imitated(monkeypatch):
        prepare(DEVICE)
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


def _on(stream, work):
    with torch.cuda.stream(stream):
        return work()


def test_streams_at_the_same_memory_need_an_event_between_them():
    there, side = torch.zeros(3, device=DEVICE), torch.cuda.Stream(DEVICE)
    with pytest.raises(RaceError, match="does not wait"):
        _on(side, lambda: there + 1)
    side.wait_stream(torch.cuda.current_stream())
    assert _on(side, lambda: there + 1).shape == (3,)
    with pytest.raises(RaceError):
        there.add_(1)  # while the other stream reads
    event = torch.cuda.Event()
    event.record(side)
    torch.cuda.current_stream().wait_event(event)
    there.add_(1)
    side.wait_stream(torch.cuda.current_stream())
    for stream in (side, torch.cuda.current_stream()):  # reads of two streams need no order
        assert _on(stream, lambda: there * 2).shape == (3,)


def test_a_race_at_pinned_memory_is_found_and_ordered_copies_arrive():
    there, side = torch.ones(4, device=DEVICE), torch.cuda.Stream(DEVICE)
    host = torch.zeros(2, 4, pin_memory=True)
    host[1].copy_(there, non_blocking=True)
    with pytest.raises(RaceError):
        _on(side, lambda: torch.zeros(4, device=DEVICE).copy_(host[1], non_blocking=True))
    side.wait_stream(torch.cuda.current_stream())
    back = _on(side, lambda: torch.zeros(4, device=DEVICE).copy_(host[1], non_blocking=True))
    assert host.tolist() == [[0] * 4, [77] * 4]  # the host has waited for nothing
    side.synchronize()
    assert host.tolist() == [[0] * 4, [1] * 4]
    assert back.tolist() == [1] * 4


def test_the_card_is_full_at_its_size_and_freed_memory_comes_back():
    set_card(1000, other_bytes=300)
    first = torch.zeros(100, device=DEVICE)
    assert torch.cuda.mem_get_info() == (300, 1000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(100, device=DEVICE)
    view = first[:3]
    del first
    assert torch.cuda.memory_allocated() == 400
    del view
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()) == (0, 400)


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.zeros(2, device=DEVICE),
        lambda: torch.zeros(2).pin_memory(),
        lambda: torch.empty(2, pin_memory=True),
        lambda: torch.cuda.Event().record(torch.cuda.current_stream()),
    ],
)
def test_nothing_is_used_before_the_device_is_set(use, monkeypatch):
    with (
        imitated_accelerator.imitated(monkeypatch),
        pytest.raises(AssertionError, match=r"before torch\.cuda\.set_dev"),
    ):
        use()


def test_attention_needs_cudnn_off():
    rows = torch.zeros(1, 2, 3, 8, device=DEVICE)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert attend(rows, rows, rows).shape == rows.shape
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    with pytest.raises(AssertionError, match="cuDNN"):
        attend(rows, rows, rows)
